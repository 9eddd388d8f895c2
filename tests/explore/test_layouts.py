"""Layouts out of the kernel's own code: pictures, counts and the emulator say the same, also of a spoiled layout."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from fa2_cute import arch, cli
from fa2_cute.explore import binding, command, kernel_layouts, pictures, records
from fa2_cute.explore.space import Point, Workload

SM_120 = arch.by_name("sm_120")
STEPS = 3


def layouts_of(point, workload):
    return kernel_layouts.extract(binding.spec_of(point, workload, SM_120))


def assert_agree(layouts, counts, steps=STEPS):
    assert layouts.wavefronts("ldmatrix", steps) == (counts.matrix_wavefronts, counts.matrix_ideal)
    assert layouts.wavefronts("cp.async", steps) == (counts.copy_wavefronts, counts.copy_ideal)


# Half of Q with so many keys that the first pass takes them: the second one goes by 16, and reads the other half twice.
@pytest.mark.parametrize(("head_dim", "held", "steps"), [(64, "none", STEPS), (96, "all", STEPS), (128, "half", 9)])
def test_layouts_and_emulator_agree(head_dim, held, steps, workload, point):
    problem = dataclasses.replace(workload, head_dim=head_dim)
    point = dataclasses.replace(point, query_held=held)
    counts = binding.counted(binding.compiled(point, problem, SM_120), problem, steps)
    layouts = layouts_of(point, problem)
    assert_agree(layouts, counts, steps)
    assert counts.matrix_wavefronts == counts.matrix_ideal > 0
    assert counts.copy_wavefronts == counts.copy_ideal > 0


def test_without_swizzle_both_count_the_same_conflicts(workload, point):
    spoiled = dataclasses.replace(point, swizzle=False)
    counts = binding.counted(binding.compiled(spoiled, workload, SM_120), workload, STEPS)
    layouts = layouts_of(spoiled, workload)
    assert_agree(layouts, counts)
    # Rows are 128 bytes apart: the eight rows of each ldmatrix matrix start in the same bank.
    assert counts.matrix_wavefronts == 8 * counts.matrix_ideal
    assert counts.conflicts >= counts.matrix_wavefronts - counts.matrix_ideal
    title = pictures.access_title(layouts, "ldmatrix K")
    assert "swizzle removed: 8 lanes, 8 wavefronts, 7 conflicts" in title
    total = sum(access.conflicts for access in layouts.of("ldmatrix K"))
    assert f"{total} conflicts" in title


def test_every_element_is_copied_and_read_once_by_each_reader(workload, point):
    layouts = layouts_of(point, workload)
    for name, tile in layouts.tiles.items():
        chunks = {(r, c) for r in range(tile.rows) for c in range(0, tile.cols, kernel_layouts.VECTOR)}
        copied = [lane for access in layouts.of(f"cp.async {name}") for lane in access.lanes]
        assert sorted(copied) == sorted(chunks)
        for warp in range(point.warps):
            read = [lane for a in layouts.of(f"ldmatrix {name}") if a.warp == warp for lane in a.lanes]
            rows = {r for r, _ in read}
            assert len(read) == len(set(read))
            assert set(read) == {(r, c) for r, c in chunks if r in rows}
            assert len(rows) == (tile.rows // point.warps if name == "Q" else tile.rows)


def test_offsets_of_a_tile_are_a_permutation(workload, point):
    for swizzle in (True, False):
        for tile in layouts_of(dataclasses.replace(point, swizzle=swizzle), workload).tiles.values():
            offsets = [offset for row in tile.chunks for offset in row]
            assert sorted(offsets) == list(range(0, tile.rows * tile.cols, kernel_layouts.VECTOR))


def test_operands_are_those_of_the_ptx_isa(workload, point):
    """m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): groups of four lanes own a row."""
    a, k, _, c = layouts_of(point, workload).operands
    for (row, col), (thread, _) in a.owner.items():
        assert thread == 4 * (row % 8) + col % 8 // 2
    for (key, col), (thread, _) in k.owner.items():
        assert thread == 4 * (key % 8) + col % 8 // 2
    for (row, col), (thread, _) in c.owner.items():
        assert thread == 4 * (row % 8) + col % 8 // 2
    assert len(set(a.owner.values())) == 16 * 16


def test_the_loop_holds_as_many_ldmatrix_as_the_layouts(kernel, workload, point):
    step, masked = records.loops(kernel)
    layouts = layouts_of(point, workload)
    a_warp = sum(len(layouts.of(f"ldmatrix {name}")) for name in "QKV") // point.warps
    assert step.opcodes()["LDSM"] == masked.opcodes()["LDSM"] == a_warp
    copies = sum(len(layouts.of(f"cp.async {name}")) for name in "KV") // point.warps
    assert step.opcodes()["LDGSTS"] == copies


def test_pictures_are_files_and_elements(tmp_path, workload, point):
    versions = [layouts_of(dataclasses.replace(point, swizzle=swizzle), workload) for swizzle in (True, False)]
    paths = pictures.save(pictures.shared_memory(versions, "ldmatrix V"), tmp_path / "v")
    assert [p.suffix for p in paths] == [".svg", ".png"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    text = paths[0].read_text()
    assert "lane 7" in text
    assert "7 conflicts" in text
    assert pictures.svg(pictures.operand(versions[0].operands[0])).startswith("<svg")
    assert "T31" in pictures.svg(pictures.operand(versions[0].operands[0]))


@pytest.mark.parametrize("head_dim", [128])
def test_the_shipped_kernel_of_sm_120_has_no_conflicts(head_dim):
    problem = Workload(head_dim, 512, 512)
    layouts = layouts_of(binding.shipped_point(problem, SM_120), problem)
    assert sum(access.conflicts for access in layouts.accesses) == 0


def test_point_names_its_spoiling():
    assert Point(64, 32, 4, 2, swizzle=False).name == "64x32x4x2-plain"


@pytest.mark.parametrize(
    ("options", "error", "announced"),
    [
        ((), "nothing is traced", True),
        (("--tile", "64by64"), "--tile: got '64by64'", False),
        (("--tile", "128x128x8x4"), "--tile: got 128x128x8x4, takes one that sm_120 can have: needs 288 KiB", False),
        (("--tile", "256x128x4x2", "--arch", "sm_90"), "--tile: got 256x128x4x2, .*: O and S alone take 524", False),
        (("--into", "file/below"), "--into: got file/below, takes a folder that can be written to: Not a dir", False),
        (("--into", "file"), "--into: got file, takes a folder that can be written to: File exists", False),
    ],
)
def test_what_takes_long_is_said_before_and_what_is_wrong_before_that(
    monkeypatch, capsys, tmp_path, options, error, announced
):
    def refuse(spec):
        raise ValueError("nothing is traced here")

    monkeypatch.setattr(kernel_layouts, "extract", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        cli.main(["layouts", *options])
    printed = capsys.readouterr()
    assert re.match(f"fa2-cute: {error}", printed.err)
    assert printed.out.startswith("Tracing the kernel's layouts") == bool(printed.out) == announced


@pytest.mark.parametrize(
    ("tile", "swizzle", "says"),
    [
        (None, True, "as shipped"),
        ("64x32x4x2-q", True, "as shipped"),
        ("128x32x4x2-h", True, "as shipped"),
        ("64x32x4x2", True, "shipped is 128x32x4x2-h or 64x32x4x2-q"),
        ("64x32x4x2-q", False, "swizzle removed"),
    ],
)
def test_only_the_shipped_tile_is_called_so(monkeypatch, tmp_path, tile, swizzle, says):
    monkeypatch.setattr(pictures, "save", lambda figure, stem: [])
    console = Console(file=io.StringIO(), width=200)
    point = None if tile is None else command.parse_tile(tile)
    command.layouts(Workload(128, 1, 1), SM_120, point, tmp_path, swizzle, console)
    printed = " ".join(console.file.getvalue().split())
    assert f"head_dim 128: one tile each, {says} " in printed
