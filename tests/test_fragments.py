"""ldmatrix addresses beside the layout that they stand for, both evaluated while a function is traced."""

import itertools

import pytest

ROWS = (16, 48, 128)


@pytest.mark.parametrize("swizzle", [True, False], ids=["swizzled", "plain"])
@pytest.mark.parametrize("cols", [32, 64, 96, 128, 192, 256])
def test_every_address_is_that_of_the_layout(cols, swizzle):
    import cutlass
    import cutlass.cute as cute

    from fa2_cute.kernels import fragments, layouts

    different = []

    def compare():
        for rows in ROWS:
            layout = layouts.smem_layout(rows, cols, swizzle=swizzle)

            def at(row, col, layout=layout):
                return 2 * int(layout((row, col)))

            lane_rows = fragments.LaneRows(0, cutlass.BFloat16, layouts.atom_cols(cols), rows, 2 * rows * cols, None)
            # A lane starts in one of 16 rows, at one of two chunks; an ldmatrix begins at each 16th column.
            for row, chunk in itertools.product((0, 3, 5, 8, 15), (0, 8)):
                for more, col in itertools.product(range(0, rows - 15, 16), range(0, cols, 16)):
                    found = lane_rows.address(at(row, chunk), more, col)
                    if found != at(row + more, chunk + col):
                        different.append((rows, row, chunk, more, col))

    @cute.jit
    def trace():
        compare()

    cute.compile(trace, options="--gpu-arch sm_120a")
    assert not different
