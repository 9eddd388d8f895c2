"""Mutants that change nothing that a result could show, each with the reason why."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Equivalent:
    """Mutants of ``kind`` whose change, opcode and source line match; patterns as in a shell.

    A source line is matched by its text, so that the table outlives other edits. An entry excuses only mutants that
    survive: one that it describes and that something notices counts as killed.
    """

    kind: str
    reason: str
    change: str = "*"
    opcode: str = "*"
    source: str = "*"

    def matches(self, kind: str, change: str, opcode: str, source: str) -> bool:
        return self.kind == kind and all(
            fnmatchcase(text, pattern)
            for text, pattern in ((change, self.change), (opcode, self.opcode), (source, self.source))
        )


def reason(kind: str, change: str, opcode: str = "", source: str = "") -> str | None:
    """Why such a mutant cannot be noticed, or None if nothing is known of it."""
    for entry in EQUIVALENTS:
        if entry.matches(kind, change, opcode, source):
            return entry.reason
    return None


_UNREAD = "the kernel reads the extents of q and the number of keys of k; the others are parameters that nothing reads"
_FLOOR = "the sign correction of a division that rounds down; lengths are not negative"
_SWITCH = "both forms are exact near the threshold; which of them a row on it takes does not matter"
_ULP = "one rounding of a float32 by one unit, 2^-23: the bounds grant every operation as much (fuzz/bounds.py)"
_REDO = "only makes the block do its tiles again, following the maximum, where it need not: slower, and as exact"
_NO_REFERENCE = "rows without a reference have O = 0 and a sum of 0, which any finite factor keeps"
_LIMIT = "a limit of -inf asks for a look at the maximum in every tile: slower, and as exact"
_UNIFORM = "broadcasts a value that all lanes of the warp have already, to let the compiler use a uniform register"
_BRANCH = "orders no memory: it keeps the compiler from turning the branch into selects"
_FOUR_SUMS = "1/64 more than 2^123, times the four lanes of a row, is still below the 2^126 that matters"
_MAXIMUM = "changes the maximum alone: a reference may be another score, and is_sound tells where that was wrong"
_UNSOUND = "in the pass that keeps its references: rows beyond FUSED_LIMIT are unsound, and their block is done again"
_NO_DIGITS = "float32 logits beyond 2^26 err by 16 or more: the bounds then allow all that the range of v does"
_BIT_OF_ZERO = "one more bit of a number in which it is 0, or whose next shift drops it"
_NO_SIGN = "differs for a scale of 0 alone, which makes nothing of Q and nothing of -Q"
_BELOW_ZERO = "a number of tiles below 0 is none as well"
_EXTREME_ROWS = (
    "seen by rows with scores of -inf alone, which any shift keeps, and beyond 2^26, which have no digits left"
)
_ALL_TILES = "tiles that no row sees are masked whole: slower, and as exact"
_FIRST_STEP = "a loop of one step, the block's first: what it waits for `start` has waited for, to read Q"
_TILES_LEFT = "of more than FOLLOWED_KEYS keys, tiles are left to load behind every step that takes references"
_KEPT_TILES = "blocks that keep their references have over FOLLOWED_KEYS keys, and so two tiles or more to keep them in"
_SOME_TILE = "without a window every block has a key tile, and a call without keys launches nothing"
_STILL_ZERO = "in a loop of one step, the block's first: O is 0 there, in whichever order"
_ALL_EXCEED = (
    "in a loop of one step, the block's first: limits are still -inf, so all rows exceed theirs that have a number"
)
_LANE_0 = "of the quotient only lane 0's is used, which has no remainder to round"
_WAYS = "which way a block follows its maximum is a matter of speed and of roundings far below the bounds"
_REPEATED = "in a maximum alone: what a tile holds past the end repeats its last key, and fewer scores are as good"

EQUIVALENTS: tuple[Equivalent, ...] = (
    # the call
    *(
        Equivalent("extent", _UNREAD, change)
        for change in ("batch of *", "heads of k *", "* of v *", "* of out *", "* of lse *")
    ),
    Equivalent("grid", "blocks of heads that do not exist have no work (ForwardSpec.grid)", "one more in y"),
    Equivalent("grid", "blocks beyond the last tile of rows have no work (schedule.batched_work)", "one more in x"),
    # arithmetic that cannot be seen
    Equivalent("rounding", _ULP, "rn to rz", "fma.rn.f32"),
    *(
        Equivalent(kind, _FLOOR, opcode=opcode, source=source)
        for kind, opcode in (
            ("comparison", "setp.*"),
            ("opposite", "setp.*"),
            ("logic", "*.pred"),
            ("selection", "selp.*"),
            ("integer_constant", "setp.*"),
            ("integer_constant", "sh?.s32"),
            ("integer_constant", "selp.*"),
        )
        for source in ("*ceil_div(*", "*// tile_n*")
    ),
    *(
        Equivalent(kind, _FLOOR, opcode=opcode, source="*head // *")
        for kind, opcode in (
            ("arithmetic", "add.s32"),
            ("comparison", "setp.*"),
            ("opposite", "setp.*"),
            ("logic", "*.pred"),
        )
    ),
    *(
        Equivalent(kind, _LANE_0, opcode=opcode, source="warp = cute.arch.make_warp_uniform(tidx // 32)")
        for kind, opcode in (
            ("comparison", "setp.*"),
            ("opposite", "setp.*"),
            ("logic", "*.pred"),
            ("arithmetic", "add.s32"),
        )
    ),
    Equivalent("integer_constant", _BIT_OF_ZERO, "+1", "and.b32"),
    Equivalent("integer_constant", _BIT_OF_ZERO, "-1", "and.b32", "*partition_C(cute.make_identity_tensor*"),
    # the softmax
    Equivalent("comparison", _SWITCH, opcode="setp.*.f32", source="*FUSED_LIMIT*"),
    Equivalent("float_constant", _SWITCH, "larger", "setp.*.f32", "*FUSED_LIMIT*"),
    *(
        Equivalent(kind, _WAYS, opcode=opcode, source="return tiles.end - tiles.begin <= *")
        for kind, opcode in (
            ("comparison", "setp.*"),
            ("opposite", "setp.*"),
            ("integer_constant", "setp.*"),
            ("guard", "bra"),
            ("selection", "selp.f32"),
            ("float_constant", "selp.f32"),
        )
    ),
    Equivalent("float_constant", _WAYS, "to 1", "fma.rn.f32", "limit = ref + *"),
    Equivalent("float_constant", _FOUR_SUMS, "larger", source="*row_sum[[]r] < largest*"),
    Equivalent("comparison", _SWITCH, opcode="setp.*.f32", source="*row_sum[[]r] < largest*"),
    Equivalent("comparison", _SWITCH, opcode="setp.*.f32", source="*row_max[[]r] > state.row_limit*"),
    Equivalent("logic", _ALL_EXCEED, "or to and", source="exceeded = exceeded | *"),
    Equivalent("float_constant", _NO_REFERENCE, "larger", "selp.f32", "factor[[]r] = *Float32(1.0)"),
    Equivalent("selection", _NO_REFERENCE, "operands swapped", "selp.f32", "factor[[]r] = *Float32(1.0)"),
    Equivalent("guard", _LIMIT, "never", "bra", "if cute.arch.vote_any_sync(exceeded):"),
    Equivalent("float_constant", _REDO, "to 1", "fma.rn.f32", "zero = *"),
    Equivalent("float_constant", _REDO, "to 1", "setp.eq.f32", "*(zero == 0.0)*"),
    Equivalent("extremum", _MAXIMUM, "max to min", "max.f32", "best = *"),
    Equivalent("selection", _REPEATED, "operands swapped", "selp.f32", "seen = *"),
    Equivalent("opposite", _REPEATED, "lt to ge", "setp.lt.s32", "seen = *"),
    Equivalent("comparison", _REPEATED, "lt to le", "setp.lt.s32", "seen = *"),
    Equivalent("float_constant", _EXTREME_ROWS, "to 1", source="unfused = *"),
    Equivalent("logic", _UNSOUND, "or to and", "or.pred", "shifted = shifted | *"),
    Equivalent("agreement", _UNSOUND, "any to all", source="if cute.arch.vote_any_sync(shifted):"),
    Equivalent("opposite", _NO_DIGITS, opcode="setp.lt.f32", source="*FUSED_LIMIT*"),
    # control
    Equivalent("comparison", _NO_SIGN, opcode="setp.*.f32", source="if inputs.scale_log2 < 0.0:*"),
    Equivalent("barrier", _BRANCH, "dropped", "bar.warp.sync", "*keeps * a branch*"),
    Equivalent("shuffle", _UNIFORM, "dropped", "shfl.sync.idx.b32"),
    Equivalent("shuffle", _UNIFORM, "lane doubled", "shfl.sync.idx.b32"),
    Equivalent("extremum", _ALL_TILES, "min to max", "min.*", "last_row = *"),
    Equivalent("extremum", _BELOW_ZERO, "relu dropped", "min.relu.s32"),
    Equivalent("guard", _TILES_LEFT, "never", "bra", "if tile >= loop.tiles.begin:"),
    Equivalent("guard", _KEPT_TILES, "never", "bra", "fused = _is_fused(state.row_offset[[]r])"),
    Equivalent("guard", _SOME_TILE, "never", "bra", "if *end > loop.tiles.begin:"),
    Equivalent("integer_constant", _SOME_TILE, "-1", "setp.*", "if *end > loop.tiles.begin:"),
    Equivalent("mma_operand", _STILL_ZERO, "C? and C? swapped", source="cute.gemm(p.tiled_mma, acc_O, *"),
    Equivalent("mma_operand", _STILL_ZERO, "no C", source="cute.gemm(p.tiled_mma, acc_O, *"),
    Equivalent("copy_wait", _FIRST_STEP, source="cute.arch.cp_async_wait_group(self.spec.stages - 2)"),
    Equivalent("barrier", _FIRST_STEP, "dropped", "bar.sync", "cute.arch.sync_threads()"),
)
