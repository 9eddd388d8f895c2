"""Packed sequences, in the emulator against float64 within derived bounds: whatever the cumulative lengths are."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_cute import checks, forward, reference
from fa2_cute.emulator.errors import GlobalRace
from fa2_cute.forward import attend
from fa2_cute.fuzz import Case, check
from fa2_cute.fuzz.judging import call, check_tensors, run
from fa2_cute.fuzz.layouts import LAYOUTS
from fa2_cute.fuzz.strategies import TESTED, cases
from fa2_cute.fuzz.values import VALUES

quiet = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
half = settings(max_examples=settings().max_examples // 2)  # of the profile's
packed = st.sampled_from([kernel for kernel in TESTED if kernel.has("varlen")])

# Kernels of strategies.TESTED: an option that is on but unwanted is set to what changes nothing.
CAUSAL = {"head_dim": 64, "causal": True}
FULL = {"dtype": "float16", "head_dim": 128, "sink": "absent"}
EVERYTHING = {
    "head_dim": 104, "value_dim": 200, "causal": True, "window": (50, None), "softcap": 20.0,
    "alibi": "of_each_sequence", "sink": "mixed",
}  # fmt: skip


@given(cases(packed, values=st.just("normal")))
@half
def test_matches_float64_on_normal_values(case):
    check(case)


@given(cases(packed))
def test_matches_float64_on_adversarial_values(case):
    check(case)


@pytest.mark.parametrize("fields", [CAUSAL, FULL, EVERYTHING], ids=["causal", "full", "everything"])
@pytest.mark.parametrize(
    "lengths",
    [
        (),
        ((0, 0),),
        ((1, 1),),
        ((128, 64), (128, 64)),
        ((127, 63), (129, 65), (1, 1)),
        ((5, 0), (0, 5), (0, 0), (3, 3)),
        ((0, 0), (0, 0), (70, 130), (0, 0)),
        ((1, 1),) * 5 + ((0, 0),) * 40 + ((1, 200),),
        ((200, 3), (3, 200)),
        ((2, 2),) * 33,
        ((0, 1),) * 70 + ((1, 1),),
    ],
    ids=lambda lengths: f"{len(lengths)} sequences, {sum(pair[0] for pair in lengths)} rows",
)
def test_lengths_at_tile_edges_empty_and_many(lengths, fields):
    for unused in ((0, 0, 0, 0), (3, 130, 1, 2)):
        check(Case(heads=4, kv_heads=2, packed=lengths, unused=unused, **fields))


@pytest.mark.parametrize("values", [values for values in VALUES if values != "values_not_finite"])
def test_every_kind_of_value(values):
    for seed in (0, 1):
        shape = {"heads": 2, "packed": ((70, 130), (3, 66), (130, 40)), "unused": (0, 2, 5, 9), "seed": seed}
        check(Case(values=values, **shape, **CAUSAL))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check(Case(heads=4, kv_heads=2, packed=((33, 65), (2, 40)), layouts=(layout,) * 3, **CAUSAL))


@quiet
@pytest.mark.parametrize("unused", [(5, 0, 0, 0), (0, 7, 0, 0), (130, 140, 3, 3)])
def test_rows_of_no_sequence_are_zero_and_minus_infinity(unused):
    _, _, _, out, lse = run(Case(heads=2, packed=((30, 40), (3, 3)), unused=unused, **CAUSAL))
    nobody = torch.ones(len(out), dtype=torch.bool)
    nobody[unused[0] : unused[0] + 33] = False
    assert (out[nobody] == 0).all()
    assert (lse[:, nobody] == -math.inf).all()
    assert lse[:, ~nobody].isfinite().all()


@quiet
def test_a_sequence_is_what_it_is_alone():
    """Bit for bit, wherever in the packing it begins: in order of rows and tiles nothing depends on its neighbours."""
    q, k, v = Case(query_len=100, key_len=150, heads=4, kv_heads=2).tensors()
    alone, alone_lse = attend(q, k, v, window=(None, 0))
    for before, after in ((0, 0), (1, 3), (130, 70)):
        padded = [torch.nn.functional.pad(x[0], (0, 0, 0, 0, before, after), value=math.nan) for x in (q, k, v)]
        cu_q, cu_k = (torch.tensor([0, before, before + n, before + n + after], dtype=torch.int32) for n in (100, 150))
        out, lse = call(*padded, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        assert torch.equal(out[before : before + 100], alone[0])
        assert torch.equal(lse[:, before : before + 100], alone_lse[0])


@pytest.mark.parametrize("fields", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("edges_q", "edges_k"),
    [
        ([0, 40, 2**31 - 1], [0, 40, 2**31 - 1]),
        ([-(2**31), 40, 90], [-1, 40, 90]),
        ([0, 40, 95], [0, 1000, 2000]),
        ([80, 300, 400], [0, 5, 90]),
        ([-50, -40, -30], [0, 5, 90]),
    ],
    ids=str,
)
def test_cumulative_lengths_beyond_the_rows_are_cut(edges_q, edges_k, fields):
    """Nothing outside the tensors is read or written (the emulator would say so), and the rest is right."""
    q, k, v = (
        x[0]
        for x in Case(fields.get("dtype", "bfloat16"), 1, 90, 90, 2, 1, fields["head_dim"]).tensors()
    )  # fmt: skip
    edges = {
        "cu_seqlens_q": torch.tensor(edges_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(edges_k, dtype=torch.int32),
    }
    options = {"causal": True} if "causal" in fields else {"sink": torch.full((2,), -math.inf)}
    check_tensors(q, k, v, **options, **edges)


@contextlib.contextmanager
def as_on_a_gpu():
    """Where nobody looks at cumulative lengths before the kernel does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "refuse_decreasing", lambda name, cu_seqlens: None)
        yield


anything = st.integers(-5, 100) | st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(anything, anything), min_size=2, max_size=40))
def test_keys_of_any_cumulative_lengths_are_those_there_are(edges):
    """Not monotone, overlapping, out of range: each sequence has the keys between its two numbers, if any."""
    q, k, v = (x[0] for x in Case(query_len=90, key_len=80, heads=2).tensors())
    cu_q = torch.tensor(sorted(pair[0] for pair in edges), dtype=torch.int32)
    cu_k = torch.tensor([pair[1] for pair in edges], dtype=torch.int32)
    with as_on_a_gpu():
        check_tensors(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@given(st.lists(st.tuples(anything, anything), min_size=2, max_size=40))
def test_cumulative_lengths_that_make_no_sense_fault_nowhere(edges):
    """Queries that overlap are written by both sequences, and the order is not defined. Every access stays inside."""
    q, k, v = (x[0] for x in Case(query_len=90, key_len=80, heads=2).tensors())
    cu_q, cu_k = torch.tensor(edges).int().unbind(1)
    with as_on_a_gpu(), contextlib.suppress(GlobalRace):
        call(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@quiet
@given(st.lists(anything, min_size=1, max_size=40))
def test_on_the_cpu_lengths_are_refused_if_and_only_if_they_decrease(numbers):
    lengths = torch.tensor(numbers, dtype=torch.int32)
    rising = lengths.sort().values
    x = torch.zeros(9, 1, 64, dtype=torch.float16)
    decreases = numbers != sorted(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.jit, "compiled", lambda *kernel: None)
        patch.setattr(forward, "launch", lambda kernel, call: None)
        for cu_q, cu_k in ((lengths, rising), (rising, lengths)):
            refusal = pytest.raises(ValueError, match=r"^cu_seqlens_[qk]: got .*, takes numbers that do not decrease")
            with refusal if decreases else contextlib.nullcontext():
                attend(x, x, x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@quiet
def test_strides_of_cumulative_lengths_do_not_matter():
    case = Case(heads=2, packed=((30, 40), (3, 3), (70, 9)), **CAUSAL)
    tensors, options = case.tensors(), case.options
    expected = attend(*tensors, **options)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        spread = torch.full((4, 3), -7, dtype=torch.int32)
        spread[:, 1] = options[name]
        options[name] = spread[:, 1]
    assert all(torch.equal(*pair) for pair in zip(attend(*tensors, **options), expected, strict=True))


@quiet
@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("sequences", [0, 1, 3])
def test_nothing_to_compute_gives_empty_results_or_zeros(rows, keys, sequences):
    q, k = torch.randn(rows, 4, 64).bfloat16(), torch.randn(keys, 2, 64).bfloat16()
    edges = [torch.full((sequences + 1,), n, dtype=torch.int32) for n in (rows, keys)]
    for cu in edges:
        cu[0] = 0
    out, lse = attend(q, k, k.clone(), window=(None, 0), cu_seqlens_q=edges[0], cu_seqlens_k=edges[1])
    assert out.shape == (rows, 4, 64)
    assert (out == 0).all()
    assert lse.shape == (4, rows)
    assert (lse == -math.inf).all()


@quiet
def test_error_is_at_most_twice_that_of_torch():
    """RMS, sequence by sequence: torch has one length a batch."""
    case = Case(heads=4, kv_heads=2, packed=((129, 193), (60, 60), (1, 130)), **CAUSAL)
    q, k, v, out, _ = run(case)
    queries, keys = (reference.sequences(case.cumulative(side), len(x)) for side, x in ((0, q), (1, k)))
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        one = (q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
        expected, _ = reference.attention(*one, causal=True)
        ours, theirs = reference.error(out[None, q0:q1], expected), reference.torch_error(*one, expected, causal=True)
        assert ours.rms <= 2 * theirs.rms
