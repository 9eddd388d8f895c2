"""The mutation tool: mutants are what they say, a fixed few of them are noticed, and the shipped kernels pass."""

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from fa2_cute import arch, emulator, jit, tiling
from fa2_cute.mutation import call_mutants, equivalents, ptx_mutants, trial
from fa2_cute.mutation.__main__ import percentage, report
from fa2_cute.mutation.attempts import Result, attempt
from fa2_cute.mutation.battery import battery
from fa2_cute.mutation.sample import Task, draw
from fa2_cute.mutation.statements import statements

# One kernel of each way to follow the maximum, one of each mask.
SPECS = [
    spec
    for spec in tiling.shipped(arch.TARGET)
    if spec.head_dim == 64 and (spec.dtype, spec.causal) in {("bfloat16", True), ("float16", False)}
]
IDS = [f"{spec.dtype}-{'causal' if spec.causal else 'full'}" for spec in SPECS]
SMALL = """
.version 8.8
.target sm_120a
.address_size 64
.visible .entry small(.param .u64 x)
{
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>;
    .loc 1 3 9
    ld.param.u64 %rd1, [x];  // setp.lt.s32 in a comment is none
    mov.u32 %r1, %tid.x;
$L0:
    setp.lt.s32 %p1, %r1, 7;
    .loc 1 3 0
    @!%p1 bra $L1;
    { .reg .pred mine; setp.ne.s32 mine, %r1, 0; vote.sync.any.pred %p2, mine, -1; }
    add.s32 %r1, %r1,
        3;
$L1:
    st.global.v4.b32 [%rd1+32], {%r1, %r2, %r3, %r4};
    ret;
}
    .file 1 "SOURCE"
"""


@pytest.fixture(scope="module", params=SPECS, ids=IDS)
def kernel(request):
    return jit.compiled(request.param, arch.TARGET)


def test_statements_know_their_place_guard_operands_line_and_source(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text("first\nsecond\n  if i < n:\n")
    ptx = SMALL.replace("SOURCE", str(source))
    found = statements(ptx)
    assert [s.opcode for s in found] == [
        "ld.param.u64", "mov.u32", "setp.lt.s32", "bra", "setp.ne.s32", "vote.sync.any.pred", "add.s32",
        "st.global.v4.b32", "ret",
    ]  # fmt: skip
    branch, addition, store = found[3], found[6], found[7]
    assert (branch.guard, branch.negated, branch.operands) == ("%p1", True, ("$L1",))
    assert addition.operands == ("%r1", "%r1", "3")
    assert store.operands == ("[%rd1+32]", "{%r1, %r2, %r3, %r4}")
    assert all(s.source == (str(source), 3, "if i < n:") for s in found)  # column 0 says nothing new
    for s in found:
        assert ptx[s.start : s.end].split()[0 if not s.guard else 1] == s.opcode
        assert s.opcode in ptx.splitlines()[s.line - 1]


def test_statements_are_all_that_the_emulator_parses(kernel):
    found, parsed = statements(kernel.ptx), emulator.load(kernel.ptx).kernel().body
    assert len(found) == len(parsed)
    for s, ins in zip(found, parsed, strict=True):
        assert s.opcode == ".".join((ins.op, *ins.mods)).replace("__", "::")
        assert s.line == ins.line
        assert len(s.operands) == len(ins.operands)


def test_a_mutant_differs_from_the_kernel_in_one_place_only(kernel):
    found = ptx_mutants.mutants(kernel.ptx)
    assert {m.kind for m in found} == {operator.__name__ for operator in ptx_mutants.OPERATORS}
    assert len({(m.start, m.after) for m in found}) >= 0.95 * len(found)  # two operators may meet on a constant
    for m in found[:: len(found) // 200]:
        mutated = m.apply(kernel.ptx)
        assert mutated != kernel.ptx
        assert mutated[: m.start] == kernel.ptx[: m.start]
        assert mutated[m.start :] == m.after + kernel.ptx[m.end :]


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("bar.sync 0", "barrier", {""}),
        ("cp.async.wait_group 1", "copy_wait", {"", "cp.async.wait_group 2"}),
        ("setp.lt.s32 %p1, %r1, 7", "comparison", {"setp.le.s32 %p1, %r1, 7"}),
        ("setp.geu.f32 %p1, %r1, 0f00000000", "comparison", {"setp.gtu.f32 %p1, %r1, 0f00000000"}),
        ("setp.eq.b32 %p1, %r1, 0", "opposite", {"setp.ne.b32 %p1, %r1, 0"}),
        ("@%p1 bra $L1", "guard", {"@!%p1 bra $L1", "bra $L1", ""}),
        ("selp.f32 %r1, %r2, 0fFF800000, %p1", "selection", {"selp.f32 %r1, 0fFF800000, %r2, %p1"}),
        ("or.pred %p1, %p2, %p0", "logic", {"and.pred %p1, %p2, %p0"}),
        ("min.relu.s32 %r1, %r2, 5", "extremum", {"max.s32 %r1, %r2, 5", "min.s32 %r1, %r2, 5"}),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1", "shuffle",
         {"shfl.sync.bfly.b32 %r1, %r2, 2, 31, -1", "mov.b32 %r1, %r2"}),
        ("vote.sync.any.pred %p1, %p2, -1", "agreement", {"vote.sync.all.pred %p1, %p2, -1", "mov.pred %p1, %p2"}),
        ("shl.b32 %r1, %r2, 0", "integer_constant", {"shl.b32 %r1, %r2, 1"}),
        ("and.b32 %r1, %r2, 8", "integer_constant", {"and.b32 %r1, %r2, 9", "and.b32 %r1, %r2, 7"}),
        ("mul.f32 %r1, %r2, 0f3F800000", "float_constant", {"mul.f32 %r1, %r2, 0f3F820000"}),
        ("cvt.rn.f16x2.f32 %r1, %r2, %r3", "rounding", {"cvt.rz.f16x2.f32 %r1, %r2, %r3"}),
        ("cvt.rn.f16x2.f32 %r1, %r2, %r3", "conversion", {"cvt.rn.f16x2.f32 %r1, %r3, %r2"}),
        ("st.global.b32 [%rd1+32], %r1", "address", {"st.global.b32 [%rd1+36], %r1", "st.global.b32 [%rd1+28], %r1"}),
        ("sub.f32 %r1, %r2, %r3", "arithmetic", {"add.f32 %r1, %r2, %r3"}),
        ("fma.rn.f32 %r1, %r2, %r3, %r4", "arithmetic", {"fma.rn.f32 %r1, %r2, %r3, 0f00000000"}),
        ("mma.sync.x {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r1, %r1}", "mma_operand",
         {"mma.sync.x {%r2, %r1}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r1, %r1}",
          "mma.sync.x {%r1, %r2}, {%r4, %r3, %r5, %r6}, {%r7, %r8}, {%r1, %r1}",
          "mma.sync.x {%r1, %r2}, {%r3, %r4, %r6, %r5}, {%r7, %r8}, {%r1, %r1}",
          "mma.sync.x {%r1, %r2}, {%r3, %r5, %r4, %r6}, {%r7, %r8}, {%r1, %r1}",
          "mma.sync.x {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r8, %r7}, {%r1, %r1}"}),
    ],
)  # fmt: skip
def test_each_operator_makes_the_faults_it_is_for(text, kind, expected):
    ptx = SMALL.replace("mov.u32 %r1, %tid.x", text)
    statement = statements(ptx)[1]
    (operator,) = (o for o in ptx_mutants.OPERATORS if o.__name__ == kind)
    assert {after for _, after in operator(statement)} == expected


def test_call_mutants_have_names_of_their_own():
    names = [(m.kind, m.change) for m in call_mutants.mutants()]
    assert len(set(names)) == len(names)
    assert len(names) > 60
    for name in names:
        assert (call_mutants.by_name(*name).kind, call_mutants.by_name(*name).change) == name


def test_a_sample_is_seeded_even_over_kinds_and_holds_every_call_mutant(kernel):
    tasks = draw([kernel], 300, seed=1)
    assert tasks == draw([kernel], 300, seed=1)
    assert tasks != draw([kernel], 300, seed=2)
    assert len(tasks) == len(set(tasks)) == 300
    calls = [task for task in tasks if task.ptx is None]
    assert len(calls) == len(call_mutants.mutants())
    kinds = Counter(task.kind for task in tasks if task.ptx is not None)
    available = Counter(m.kind for m in ptx_mutants.mutants(kernel.ptx))
    assert all(kinds[kind] >= min(available[kind], max(kinds.values()) - 1) for kind in available)


# ---- trials ----------------------------------------------------------------------------------------------------------


def test_the_kernel_as_it_is_passes_its_battery(kernel):
    assert trial.try_none(kernel.spec) == trial.Verdict("", -1)


@pytest.mark.parametrize("seed", [0])
def test_a_fixed_few_are_noticed(kernel, seed):
    """One PTX mutant of each kind and a few of the call; `make mutants` tries many more."""
    tasks = draw([kernel], len(call_mutants.mutants()) + len(ptx_mutants.OPERATORS), seed)
    chosen = [task for task in tasks if task.ptx is not None]
    chosen += [task for task in tasks if task.kind in ("GQA", "scale", "kernel")][:6]
    missed = [str(result.task) for result in map(attempt, chosen) if not result.noticed and not result.excuse]
    assert not missed, "\n".join(missed)


def test_a_kernel_that_never_ends_is_noticed(kernel, monkeypatch):
    monkeypatch.setattr(trial, "HANG_SECONDS", 1.0)
    first = statements(kernel.ptx)[0]
    forever = ptx_mutants.PtxMutant(
        "loop", "", first.start, first.start, "", "$FOREVER: bra $FOREVER; ", "bra", 1, ("", 0, "")
    )
    assert trial.try_ptx(kernel.spec, forever) == trial.Verdict("Hang", 0)


def test_what_the_emulator_refuses_is_noticed(kernel):
    first = statements(kernel.ptx)[0]
    nonsense = ptx_mutants.PtxMutant(
        "nonsense", "", first.start, first.start, "", "frobnicate.b32 %r1; ", "", 1, ("", 0, "")
    )
    assert trial.try_ptx(kernel.spec, nonsense).noticed in ("UnknownInstruction", "ParseError")


def test_the_battery_is_of_the_kernel_and_holds_no_case_twice(kernel):
    cases = battery(kernel.spec)
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert (case.dtype, case.head_dim, case.causal) == (kernel.spec.dtype, kernel.spec.head_dim, kernel.spec.causal)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_percentage_is_of_those_that_are_not_equivalent():
    def results(killed, survived, excused):
        task = Task(SPECS[0], "kind", "change")
        return (
            [Result(task, "WrongResult", 0, None)] * killed
            + [Result(task, "", -1, None)] * survived
            + [Result(task, "", -1, "why")] * excused
        )

    assert percentage(results(97, 3, 50)) == 97.0
    assert percentage(results(0, 1, 9)) == 0.0
    assert percentage(results(0, 0, 9)) == 100.0


def test_the_report_lists_survivors_with_ptx_and_source(kernel, capsys):
    from rich.console import Console

    mutant = next(m for m in ptx_mutants.mutants(kernel.ptx) if m.kind == "comparison")
    task = Task(kernel.spec, mutant.kind, mutant.change, mutant)
    report([Result(task, "", -1, None), Result(task, "WrongResult", 2, None)], Console(width=300))
    printed = capsys.readouterr().out
    assert f"PTX line {mutant.line}" in printed
    assert mutant.source[2][:30] in printed
    assert "50.0%" in printed


def test_every_equivalence_has_a_reason_names_a_kind_and_is_about_code_that_exists():
    kinds = {operator.__name__ for operator in ptx_mutants.OPERATORS} | {m.kind for m in call_mutants.mutants()}
    folder = Path(tiling.__file__).parent
    lines = [line.strip() for path in folder.glob("kernels/*.py") for line in path.read_text().splitlines()]
    for entry in equivalents.EQUIVALENTS:
        assert entry.kind in kinds
        assert len(entry.reason) > 20
        assert re.search(r"[^*]", entry.change + entry.opcode + entry.source), f"too broad: {entry}"
        assert any(fnmatchcase(line, entry.source) for line in lines), f"no line of the kernels is like {entry.source}"
