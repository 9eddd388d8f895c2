"""The append kernel in the emulator against the judge: what is written, and that nothing else is."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import example, given
from kvcases import DTYPES, SETTINGS, Case, Options, Setting, cases, make

from fa2_cute import arch, emulation, jit, resources
from fa2_cute.append import FIRST_OVERLAP, append
from fa2_cute.append_spec import AppendSpec
from fa2_cute.fuzz.cache_judging import judge_append
from fa2_cute.fuzz.cache_judging import run_append as run
from fa2_cute.reference_cache import Cache

ORDERED = Options(causal=True)  # queries have positions of their own


def check(case, device="cpu"):
    t = make(case, device)
    judge_append(case, t, *run(case, t))


@given(cases())
@example(Case(SETTINGS[0], (0,)))
@example(Case(SETTINGS[2], (7, 8, 9), new_len=9, length=8, width=3))
@example(Case(SETTINGS[4], (120, 0), new_len=12, length=130))
def test_writes_the_new_tokens_and_nothing_else(case):
    check(case)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(setting):
    shape = {"new_len": 4, "query_len": 3, "kv_heads": 2, "length": 16, "width": 2}
    check(Case(setting, (0, 5, 14, 40), **shape, options=ORDERED, missing=True))


@pytest.mark.parametrize("setting", SETTINGS[1:3])
def test_a_long_prompt_takes_many_blocks(setting):
    """Rows of 40 elements leave threads of a block idle, which must not work on the next block's rows."""
    shape = {"new_len": 60, "query_len": 60, "kv_heads": 3, "group": 1, "length": 16 if setting.paged else 64}
    check(Case(setting, (3, 0), **shape, width=4, options=ORDERED))


def test_a_key_that_saturates_and_one_that_is_nan():
    setting = Setting(cache_dtype="float8_e4m3fn")
    t = make(Case(setting, (0,), new_len=1))
    t.k[0, 0, 0, :4] = torch.tensor([1e30, -1e30, torch.inf, torch.nan])
    run(Case(setting, (0,), new_len=1), t)
    stored = t.cache.k[0, 0, 0, :4].float()
    assert stored[:3].tolist() == [448.0, -448.0, 448.0]
    assert stored[3].isnan()


def test_a_position_without_an_angle_gives_nan():
    case = Case(SETTINGS[1], (6,), new_len=1, query_len=4, length=8, options=ORDERED)
    t = make(case)
    t.cos, t.sin = t.cos[:8], t.sin[:8]
    _, rotated = run(case, t)
    known = torch.tensor([True, True, False, False])  # positions 6, 7, 8, 9
    angles = SETTINGS[1].rotary_dim
    assert torch.equal(rotated[0, :, 0, :angles].isfinite().all(dim=1), known)
    assert rotated[0, :, 0, angles:].isfinite().all()


def test_a_cache_of_more_than_2_to_the_31_elements():
    """Slots around elements 2^31 and 2^32: offsets have 64 bits. Memory that is not written is not even there."""
    rows, length, dim = 3, 2**25, 64
    k_cache = torch.empty((rows, length, 1, dim), dtype=torch.float8_e4m3fn)
    v_cache = torch.empty((rows, length, 1, dim), dtype=torch.float8_e4m3fn)
    k = torch.randn(2, 2, 1, dim).bfloat16()
    seqlens = torch.tensor([length - 1, length // 2], dtype=torch.int32)
    index = torch.tensor([0, 2], dtype=torch.int32)
    append(k, k, k_cache, v_cache, seqlens, capacity=length, cache_batch_idx=index)
    for cache in (k_cache, v_cache):
        assert torch.equal(cache[0, -1, 0].float(), k[0, 0, 0].to(DTYPES["float8_e4m3fn"]).float())
        assert torch.equal(cache[2, length // 2 : length // 2 + 2].float(), k[1].to(cache.dtype).float())


def test_strided_caches_and_new_tokens():
    """Keys and values side by side in one buffer, as many engines lay them out; new ones from a packed projection."""
    both = torch.full((2, 3, 8, 2, 64), 5.0).bfloat16()  # (2, rows, length, kv_heads, dim)
    packed = torch.randn(3, 2, 2, 2, 64).bfloat16()  # (batch, new_len, k or v, kv_heads, dim)
    seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    lengths, _ = append(packed[:, :, 0], packed[:, :, 1], both[0], both[1], seqlens, capacity=8)
    assert lengths.tolist() == [2, 5, 8]
    for i, x in enumerate((both[0], both[1])):
        new = packed[:, :, i]
        expected = torch.full((3, 8, 2, 64), 5.0).bfloat16()
        expected[0, 0:2], expected[1, 3:5], expected[2, 7] = new[0], new[1], new[2, 0]
        assert torch.equal(x, expected)


def test_misaligned_new_tokens_are_copied_first():
    wide = torch.randn(1, 1, 1, 65).bfloat16()
    cache = torch.zeros(1, 4, 1, 64).bfloat16()
    append(wide[..., 1:], wide[..., 1:], cache, cache.clone(), torch.zeros(1, dtype=torch.int32), capacity=4)
    assert torch.equal(cache[0, 0], wide[0, 0, :, 1:])


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_compiles_without_spilling(name):
    architecture = arch.by_name(name)
    for setting in SETTINGS:
        kinds = {"unit": "unit", "block": "block"}  # a factor for a tensor or a head is one for each sequence
        descales = {k: kinds.get(getattr(setting, k), "sequence") for k in ("k_descale", "v_descale")}
        narrow = setting.cache_dtype.startswith("float8")
        if narrow and architecture.capability < (8, 9):
            continue  # cvt.e4m3x2 came with sm_89
        overlap = architecture.capability >= FIRST_OVERLAP
        spec = AppendSpec(**{**asdict(setting), **descales}, overlap=overlap)
        used = resources.usage(jit.compiled(spec, architecture))
        assert used.stack_bytes == 0, spec
        assert used.registers <= 128, spec  # four blocks and more an SM: memory latency is all there is to hide


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("cache_dtype", "float16"),
        ("head_dim", 60),
        ("value_dim", 0),
        ("rotary_dim", 24),
        ("rotary_dim", 80),
        ("rotary_dtype", "float16"),
        ("k_descale", "head"),
        ("v_descale", "sequence"),  # with a cache of 16 bits
    ],
)
def test_a_specification_refuses(name, value):
    right = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "head_dim": 64, "value_dim": 64}
    with pytest.raises(ValueError, match=rf"^{name}: got .*takes"):
        AppendSpec(**{**right, name: value})


def test_a_paged_specification_is_not_indexed():
    with pytest.raises(ValueError, match=r"^indexed: got True"):
        AppendSpec("bfloat16", "bfloat16", 64, 64, paged=True, indexed=True)


def test_lengths_and_tables_that_are_views():
    """Every fifth length, a column of a table: the strides torch leaves at extents of 1 do not reach the launcher."""
    case = Case(SETTINGS[2], (3,), new_len=2, length=8, width=1)
    t, twin = make(case), make(case)
    t.seqlens = torch.tensor([3, 9, 9, 9, 9, 0], dtype=torch.int32)[::5][:1]
    wide = twin.cache.block_table.expand(1, 4).contiguous()
    t.cache = Cache(t.cache.k, t.cache.v, wide[:, ::3][:, :1])
    assert (t.seqlens.stride(0), t.cache.block_table.stride(1)) == (5, 3)
    given_ = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "announce_and_run", lambda kernel, grid, values, tiles: given_.update(values=values))
        run(case, t)
    assert all(x.stride(-1) == 1 for x in given_["values"] if isinstance(x, torch.Tensor))
    lengths, _ = run(case, t)
    expected, _ = run(case, twin)
    assert torch.equal(lengths, expected)
    assert torch.equal(t.cache.k.view(torch.uint8), twin.cache.k.view(torch.uint8))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_launcher_takes_the_arguments(setting, monkeypatch):
    """The function that a GPU would be launched by, on CPU tensors: all it has to say is that they are on the CPU."""
    calls = []
    monkeypatch.setattr(
        emulation, "announce_and_run", lambda kernel, grid, values, tiles: calls.append((kernel, values))
    )
    case = Case(setting, (0, 5), new_len=3, query_len=2)
    run(case, make(case))
    ((kernel, values),) = calls
    with pytest.raises(ValueError, match="device_type=cuda"):
        kernel.function(*values)
