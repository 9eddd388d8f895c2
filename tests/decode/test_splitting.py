"""How many splits, and which dense calls are split: plain data; then those calls in the emulator."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fa2_cute import arch, decode, forward, split_calls, splitting, tiling
from fa2_cute.decode_spec import MAX_SPLITS, choose
from fa2_cute.forward import SPLIT_KEYS
from fa2_cute.fuzz import Case, check
from fa2_cute.problem import Problem
from fa2_cute.spec import CAUSAL, FULL
from fa2_cute.splitting import CACHE, FORWARD, Division, Keys, choose_splits

SPEC = choose("bfloat16", "bfloat16", 128, 128, 4)
WIDE = choose("bfloat16", "bfloat16", 128, 128, 64)
H200, RTX_5090 = (arch.BY_NAME["sm_90"], 132), (arch.BY_NAME["sm_120"], 170)
devices = st.sampled_from([H200, RTX_5090])
WHOLE = Division(FORWARD, 1)


@given(devices, st.integers(1, 5000), st.integers(1, 2**20))
def test_splits_fill_the_gpu_and_leave_each_something_to_do(device, blocks, capacity):
    _, sms = device
    splits = choose_splits(SPEC, *device, blocks, capacity)
    keys_a_step = SPEC.warps_n * SPEC.tile_n
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits * keys_a_step <= capacity
    if blocks >= 20 * sms:
        assert splits == 1
    # Keys enough for two blocks an SM, with as many steps each as the choice asks for: fewer fill some SMs twice.
    if blocks * 2 <= sms and capacity >= max(2 * MAX_SPLITS, 2 * sms * splitting.FEWEST_STEPS_OF_TWO) * keys_a_step:
        waves = -(-blocks * splits // sms)
        assert blocks * splits >= 0.8 * waves * sms


def test_splits_on_an_rtx_5090_and_an_h200():
    """Those that were fastest on the H200, or within what two runs differ by: docs/decode.md."""
    assert [choose_splits(SPEC, *H200, 8, keys) for keys in (1024, 8192, 32768)] == [8, 32, 32]
    assert [choose_splits(SPEC, *H200, 32, keys) for keys in (1024, 8192, 131072)] == [4, 8, 4]
    assert [choose_splits(SPEC, *H200, blocks, 8192) for blocks in (128, 512)] == [1, 1]
    fp8 = choose("bfloat16", "float8_e4m3fn", 128, 128, 4)
    assert [choose_splits(fp8, *H200, 128, keys) for keys in (1024, 8192, 32768)] == [1, 2, 1]
    assert choose_splits(SPEC, *RTX_5090, 8, 8192) in range(19, 22)  # one block an SM, which has no room for two
    assert choose_splits(fp8, *RTX_5090, 160, 8192) == 1


@given(devices, st.integers(1, 2000), st.integers(1, 2**20))
def test_splits_of_tiles_of_64_rows_have_keys_enough(device, blocks, keys):
    splits = choose_splits(WIDE, *device, blocks, keys)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits * splitting.FEWEST_KEYS <= keys
    _, sms = device
    if blocks * 8 <= sms and keys >= 2**16:
        assert blocks * splits >= sms


def problem(batch, query_len, key_len, heads, kv_heads, features=FULL, head_dim=128):
    return Problem("bfloat16", batch, query_len, key_len, heads, kv_heads, head_dim, head_dim, features)


def divide(problem, device, splitting_kernels=(FORWARD, CACHE), window=(None, None)):
    return split_calls.divide(problem, window, *device, splitting_kernels)


@given(devices, st.sampled_from([(32, 8), (16, 16), (8, 1), (1, 1)]), st.data())
def test_a_call_with_few_tiles_on_many_keys_is_split(device, heads, data):
    architecture, sms = device
    tile_m = tiling.choose("bfloat16", 128, 128, FULL, architecture).tile_m
    most = sms // 4 // heads[0]  # tiles of a head
    assume(most)
    batch = data.draw(st.integers(1, min(8, most)), label="batch")
    query_len = data.draw(st.integers(1, min(2000, most // batch * tile_m)), label="query_len")
    assert batch * heads[0] * -(-query_len // tile_m) <= sms // 4
    assert divide(problem(batch, query_len, 16384, *heads), device) != WHOLE


@given(devices, st.integers(1, 8), st.integers(128, 5000), st.integers(1024, 2**17), st.sampled_from([FULL, CAUSAL]))
def test_a_call_that_fills_the_device_many_times_is_not(device, batch, query_len, key_len, features):
    _, sms = device
    rows = query_len // 128 * 128
    assume(batch * 32 * (rows // 128) >= 8 * sms)
    window = (None, 0 if features.right else None)
    assert divide(problem(batch, rows, key_len, 32, 8, features), device, window=window) == WHOLE


@given(devices, st.integers(1, 4), st.integers(1, 3000), st.integers(1, 2**17), st.sampled_from(["", FORWARD, CACHE]))
def test_what_cannot_be_split_is_not(device, batch, query_len, key_len, able):
    found = divide(problem(batch, query_len, key_len, 16, 4), device, (able,) if able else ())
    assert found.kernels in (able, FORWARD)
    assert 0 <= found.splits <= MAX_SPLITS
    if key_len < SPLIT_KEYS or not able:
        assert found == WHOLE
    if found.splits > 1:
        assert found.splits * splitting.FEWEST_KEYS <= key_len


MEASURED = [  # microseconds of the forward kernel and of the kernels for KV caches, full attention: docs/decode.md
    (1, 512, 8192, (32, 8), False),  # 200, 230
    (1, 512, 8192, (16, 16), True),  # 197, 123
    (1, 256, 16384, (32, 8), True),  # 379, 228
    (1, 128, 32768, (8, 1), True),  # 684, 71
    (4, 128, 8192, (32, 8), False),  # 200, 225
    (4, 128, 8192, (16, 16), True),  # 204, 126
    (1, 1024, 8192, (16, 16), False),  # 193, 223
    (1, 1024, 8192, (8, 1), True),  # 168, 122
    (1, 2048, 2048, (8, 1), False),  # 50, 65
    (2, 512, 2048, (32, 8), False),  # 86, 126
    (1, 128, 2048, (32, 8), True),  # 47, 28
]


@pytest.mark.parametrize(("batch", "query_len", "key_len", "heads", "split"), MEASURED)
def test_the_faster_of_two_kernels_on_an_h200(batch, query_len, key_len, heads, split):
    found = divide(problem(batch, query_len, key_len, *heads), H200, (CACHE,))
    assert (found.kernels == CACHE) is split


@pytest.mark.parametrize(
    ("batch", "query_len", "key_len", "heads", "expected"),
    [
        (1, 512, 8192, (32, 8), WHOLE),  # 128 tiles for 132 SMs: 168 us, in two splits 169
        (1, 256, 65536, (32, 8), Division(FORWARD, 4)),  # 617 us; 1287, and on the kernels for KV caches 876
        (1, 2048, 2048, (2, 2), Division(FORWARD, 4)),  # 22 us; 48, and 28
        (2, 8192, 8192, (32, 8), WHOLE),
        (1, 1024, 8192, (32, 8), WHOLE),  # 256 tiles
        (1, 64, 65536, (32, 8), Division(CACHE, 8)),  # half of a tile of 128 rows would be empty
        (1, 1, 8192, (32, 8), Division(CACHE, 0)),  # few rows: as many as those kernels choose
        (1, 16, 1023, (32, 8), WHOLE),
    ],
)
def test_the_fastest_of_three_on_an_h200(batch, query_len, key_len, heads, expected):
    """Measured: docs/decode.md."""
    assert divide(problem(batch, query_len, key_len, *heads), H200) == expected


@pytest.mark.parametrize(
    ("query_len", "key_len", "window", "mean", "most"),
    [
        (4, 10, (None, None), 10, 10),
        (4, 10, (None, 0), 9, 10),
        (4, 10, (2, 0), 3, 3),
        (10, 4, (None, 0), 0, 4),
        (4, 10, (None, -20), 0, 0),
        (5, 5, (1, 1), 3, 3),
    ],
)
def test_keys_that_queries_see(query_len, key_len, window, mean, most):
    assert split_calls.keys_seen(problem(1, query_len, key_len, 1, 1), window) == Keys(mean, most)


def test_what_a_call_is_able_to():
    """In the emulator the forward kernel is not split; packed sequences and empty calls never are."""
    q, k = torch.zeros(2, 30, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 1100, 2, 64, dtype=torch.bfloat16)

    def able(q, k, v, **options):
        problem, _, inputs = forward.check(q, k, v, **options)
        return split_calls.kernels_that_split(problem, inputs)

    assert able(q, k, k) == (CACHE,)
    assert able(q, k, k, mask=torch.ones(30, 1100, dtype=torch.bool)) == ()
    assert able(q[:, :0], k, k) == able(q[:0], k[:0], k[:0]) == able(q[:, :, :0], k, k) == ()
    lengths = torch.tensor([0, 30], dtype=torch.int32), torch.tensor([0, 1100], dtype=torch.int32)
    assert able(q[0], k[0], k[0], cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1]) == ()


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (Case(query_len=70, key_len=1300, heads=4, causal=True), True),
        (
            Case("float16", 2, 40, 1100, 3, 1, 64, 40, window=(1050, 60), softcap=5.0, alibi="ladder", sink="normal"),
            True,
        ),
        (Case(query_len=70, key_len=1300, heads=4, window=(100, 0)), False),  # each query sees 101 keys
        (Case(query_len=70, key_len=1023, heads=4), False),
        (Case(batch=0, query_len=70, key_len=1300, heads=4), False),
        (Case(batch=0, query_len=1, key_len=1300, heads=4), False),
        (Case(query_len=0, key_len=1300, heads=4), False),
    ],
    ids=repr,
)
def test_a_call_with_few_tiles_is_right(case, split, monkeypatch):
    calls = []
    prepare = decode.prepare
    monkeypatch.setattr(decode, "prepare", lambda *given, **options: calls.append(1) or prepare(*given, **options))
    check(case)
    assert len(calls) == split
    assert case.key_len >= SPLIT_KEYS or not split
