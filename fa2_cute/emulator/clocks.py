"""Happens-before in shared memory: vector clocks of the warps of a block and of the lanes of a warp.

A warp's clock advances when it arrives at a barrier and when its lanes meet at ``bar.warp.sync``. Every access has a
*code*: clock, lane and warp in one uint32, ordered by clock. Two accesses of different warps are ordered by what one
warp has *seen* of the other. Two accesses of one warp are ordered if one lane made both, or if its lanes have *met*
in between, which nothing but bar.warp.sync and the barriers of the block makes them do (PTX ISA, bar.warp.sync and
barrier): shuffles, votes and mma.sync order no memory.

An instruction such as ldmatrix accesses a row for every lane; its code has WHOLE in place of a lane.
"""

from __future__ import annotations

import numpy as np

from .errors import EmulatorError

LANE_SHIFT, CLOCK_SHIFT = np.uint32(5), np.uint32(11)  # 5 bits for the warp, 6 for the lane or WHOLE
WHOLE = np.uint32(32 << 5)
PLACE_BITS = np.uint32((1 << 11) - 1)
FIRST_RESERVED = 0xF8000000  # shared memory gives meanings of its own to the codes from here on
CLOCKS = FIRST_RESERVED >> 11
ALWAYS = np.uint32(0xFFFFFFFF)
LANES = np.arange(32)


class Clocks:
    """The clocks of ``blocks`` resident blocks of ``warps`` warps.

    seen       (blocks, warps, warps) last clock of warp v whose accesses warp w comes after; w, w is its own clock
    full       (blocks,) all accesses below this clock come before everything now running
    met        (blocks, warps) the warp's own accesses below this clock come before all that any of its lanes do now
    lane_seen  (blocks, warps, 32, 32) last clock of lane b whose accesses lane a comes after; None unless ``masks``,
               where bar.warp.sync may name some lanes of a warp only
    """

    def __init__(self, blocks: int, warps: int, masks: bool):
        self.blocks, self.warps = blocks, warps
        self.own = np.arange(warps)
        self.seen = np.zeros((blocks, warps, warps), np.uint32)
        self.seen[:, self.own, self.own] = 1
        self.full = np.ones(blocks, np.uint32)
        self.met = np.ones((blocks, warps), np.uint32)
        self.lane_seen = None
        if masks:
            self.lane_seen = np.zeros((blocks, warps, 32, 32), np.uint32)
            self.lane_seen[..., LANES, LANES] = ALWAYS
        self.version = 0
        self.refresh()

    def refresh(self) -> None:
        """Recomputes what accesses look up, after the clocks moved."""
        self.version += 1
        clock = self.seen[:, self.own, self.own]
        if clock.max(initial=0) >= CLOCKS:
            raise EmulatorError(
                f"a warp passed more than {CLOCKS} barriers: shared memory is checked up to there; "
                f"launch with checks=False"
            )
        self.code = ((clock << CLOCK_SHIFT) | self.own.astype(np.uint32)).reshape(-1)
        self.limit = self.full << CLOCK_SHIFT
        self.since = (self.met << CLOCK_SHIFT).reshape(-1)

    # ---- barriers of the block -----------------------------------------------------------------------------
    def synchronise_all(self, blocks) -> None:
        """A barrier that every warp of these blocks (index array or slice) passed."""
        now = self.seen[blocks].max(axis=(1, 2)) + np.uint32(1)
        part = np.repeat(now - np.uint32(1), self.warps * self.warps).reshape(-1, self.warps, self.warps)
        part[:, self.own, self.own] = now[:, None]
        self.seen[blocks] = part
        self.full[blocks] = now
        self.met[blocks] = now[:, None]
        if self.lane_seen is not None:
            self.lane_seen[blocks] = (now - np.uint32(1))[:, None, None, None]
            self.lane_seen[..., LANES, LANES] = ALWAYS
        self.refresh()

    def depart(self, block: int, warps: np.ndarray) -> np.ndarray:
        """Warps arrive at a barrier: returns what they bring to it and advances their clocks (refresh after)."""
        brought = self.seen[block, warps].max(axis=0)
        self.seen[block, warps, warps] += np.uint32(1)
        return brought

    def join(self, block: int, warps: np.ndarray, brought: np.ndarray) -> None:
        """Warps leave a barrier having seen everything brought to it (refresh after)."""
        self.seen[block, warps] = np.maximum(self.seen[block, warps], brought)
        self._meet(np.full(len(warps), block), warps)

    # ---- lanes ---------------------------------------------------------------------------------------------
    def synchronise_lanes(self, t, members) -> None:
        """bar.warp.sync by the threads of ``t``, whose member masks have been checked."""
        if np.ndim(members) == 0 and int(members) == 0xFFFFFFFF and t.is_whole:
            warps = t.global_warp[::32]
            self._advance(warps)
            self._meet(*np.divmod(warps, self.warps))
            self.refresh()
            return
        members = np.broadcast_to(np.asarray(members, np.uint32), (t.n,))
        everybody = (members | t.exited_lanes()) == ALWAYS
        for mask in np.unique(members[~everybody]):
            some = np.unique(t.global_warp[~everybody & (members == mask)])
            self._meet_in_part(*np.divmod(some, self.warps), np.flatnonzero(mask >> LANES.astype(np.uint32) & 1))
        self._advance(np.unique(t.global_warp))
        self._meet(*np.divmod(np.unique(t.global_warp[everybody]), self.warps))
        self.refresh()

    def _advance(self, warps) -> None:
        block, warp = np.divmod(warps, self.warps)
        self.seen[block, warp, warp] += np.uint32(1)

    def _meet(self, block, warp) -> None:
        """All lanes of these warps come after everything their warp did before its clock's last step."""
        now = self.seen[block, warp, warp]
        self.met[block, warp] = now
        if self.lane_seen is not None:
            table = np.repeat(now - np.uint32(1), 1024).reshape(-1, 32, 32)
            table[:, LANES, LANES] = ALWAYS
            self.lane_seen[block, warp] = table

    def _meet_in_part(self, block, warp, lanes) -> None:
        """``lanes`` of these warps come after all that each of them did or had seen up to now."""
        where = block[:, None], warp[:, None], lanes
        known = self.lane_seen[where]
        known[:, np.arange(len(lanes)), lanes] = self.seen[block, warp, warp][:, None]
        self.lane_seen[where] = known.max(axis=1)[:, None]
        self.lane_seen[block[:, None], warp[:, None], LANES, LANES] = ALWAYS

    def lanes_ordered(self, t, some, whole: bool, code, by_lane=None):
        """Whether earlier accesses of the own warp come before what the threads ``some`` (positions in t) do now.

        ``whole``: every lane of the warp does it. ``code``: of the earlier access. ``by_lane(positions in some)``:
        (n, 32) the last clock of each lane's access, where ``code`` with WHOLE may stand for some lanes only.
        """
        ordered = code < self.since[t.global_warp[some]]
        if not whole:
            ordered |= (code & PLACE_BITS) == (t.code[some] & PLACE_BITS)
        left = np.flatnonzero(~ordered)
        if left.size and self.lane_seen is not None:
            which = some[left]
            table = self.lane_seen[t.cta[which], t.warp[which]]
            known = table.min(axis=1) if whole else table[np.arange(left.size), t.lane[which]]
            ordered[left] = (known >= (spread(code[left]) if by_lane is None else by_lane(left))).all(axis=1)
        return ordered


def spread(code):
    """(n, 32) the clock of an access for the lanes that made it, 0 for others."""
    lane = (code & PLACE_BITS) >> LANE_SHIFT
    made = (lane[:, None] == LANES) | (lane >= 32)[:, None]
    return np.where(made, (code >> CLOCK_SHIFT)[:, None], np.uint32(0))


class Accesses:
    """The last accesses of a kind (reads of a width, atomics) to each unit of shared memory, by warp.

    codes   (units, warps) code of each warp's last access, 0 for none. WHOLE if several lanes have accessed the unit
            since they last met.
    clocks  (units, warps * 32) clock of each lane's last access; None unless ``masks`` (see Clocks)
    """

    def __init__(self, units: int, warps: int, masks: bool):
        self.warps = warps
        self.codes = np.zeros((units, warps), np.uint32)
        self.clocks = np.zeros((units, warps * 32), np.uint32) if masks else None

    def record(self, t, units, whole: bool) -> None:
        """Each thread of t accesses its unit; with ``whole``, so does every other lane of its warp."""
        codes = self.codes.reshape(-1)
        place = units * self.warps + t.warp
        if whole:
            codes[place] = t.whole_code
        else:
            code = t.code
            before = codes.take(place)
            codes[place] = code
            # Another lane of this instruction, or one since the lanes met.
            several = codes.take(place) != code
            several |= (before >= t.since) & (((before ^ code) & PLACE_BITS) != 0)
            if several.any():
                codes[place[several]] = code[several] | WHOLE
        if self.clocks is not None:
            lanes = LANES if whole else t.lane[:, None]
            self.clocks[units[:, None], 32 * t.warp[:, None] + lanes] = (t.code >> CLOCK_SHIFT)[:, None]

    def by_lane(self, units, warp):
        """(n, 32) clocks of the lanes of one warp each."""
        return self.clocks[units[:, None], 32 * warp[:, None] + LANES]
