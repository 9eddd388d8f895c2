"""Barriers: bar and barrier with sync, arrive and red, their happens-before, and the report of a deadlock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .active import Active
from .errors import BarrierMismatch, PartialWarp


@dataclass
class Barrier:
    """One barrier of one block that has not completed."""

    expected: int
    arrived: int = 0
    brought: object = None
    waiting: list = field(default_factory=list)
    arrivers: set = field(default_factory=set)
    site: object = None
    synced: set = field(default_factory=set)


class Barriers:
    """The barriers of the resident blocks; ``open`` holds those that somebody waits at, by (block, id)."""

    def __init__(self, machine):
        self.machine = machine
        self.open: dict[tuple[int, int], Barrier] = {}

    def meet(self, block, t, idx, site, number, count, value) -> None:
        """bar.sync, bar.arrive and bar.red: completes at once where all warps of a block are here."""
        if site.aligned:
            self.check_aligned(site, t)
        resume = block.targets[0]
        simple = isinstance(number, int) and isinstance(count, (int, type(None))) and site.action == "sync"
        if simple and not 0 <= number < 16:
            self.machine.fail(
                BarrierMismatch,
                site,
                t,
                0,
                f"barrier {number} does not exist; there are 16",
                "use ids 0 to 15",
            )
        if simple and t.is_whole and count in (None, self.machine.padded) and not self.open:
            if idx is None:
                self.machine.shared.clocks.synchronise_all(slice(None))
                return self.machine.push(resume, None)
            per_block = np.bincount(t.cta, minlength=self.machine.count)
            here = per_block == self.machine.padded
            if here.any():
                self.machine.shared.clocks.synchronise_all(np.flatnonzero(here))
                ready = here[t.cta]
                if ready.all():
                    return self.machine.push(resume, idx)
                self.machine.push(resume, idx[ready])
                t = Active(self.machine, idx[~ready])
        self.arrive_slowly(t, site, number, count, value, resume)
        return None

    def check_aligned(self, site, t) -> None:
        """.aligned barriers must be met by whole warps (exited lanes aside)."""
        if t.is_whole:
            return
        counts = np.bincount(t.global_warp, minlength=len(self.machine.exited) // 32)
        present = 32 - self.machine.exited.reshape(-1, 32).sum(axis=1)
        partial = (counts > 0) & (counts < present)
        if partial.any():
            warp = int(np.flatnonzero(partial)[0])
            i = int(np.flatnonzero(t.global_warp == warp)[0])
            self.machine.fail(
                PartialWarp, site, t, i,
                f"only {int(counts[warp])} of the warp's {int(present[warp])} live lanes reached this "
                f"barrier",
                "bar is .aligned: the whole warp must reach it; use barrier.sync in divergent code",
            )  # fmt: skip

    def arrive_slowly(self, t, site, number, count, value, resume) -> None:
        """Barrier arrival block by block: any ids, counts and mixtures of sync and arrive."""
        numbers = np.broadcast_to(np.asarray(number, np.int64), (self.machine.threads if t.idx is None else t.n,))
        counts = np.broadcast_to(np.asarray(self.machine.padded if count is None else count, np.int64), numbers.shape)
        keys = t.cta * 16 + np.clip(numbers, 0, 15)
        if ((numbers < 0) | (numbers > 15)).any():
            i = int(np.flatnonzero((numbers < 0) | (numbers > 15))[0])
            self.machine.fail(
                BarrierMismatch, site, t, i, f"barrier {int(numbers[i])} does not exist", "use ids 0 to 15"
            )
        for key in np.unique(keys):
            mine = np.flatnonzero(keys == key)
            cta, bar = int(key) // 16, int(key) % 16
            i = int(mine[0])
            expected = int(counts[i])
            if (counts[mine] != expected).any():
                self.machine.fail(
                    BarrierMismatch,
                    site,
                    t,
                    i,
                    f"threads give barrier {bar} different counts",
                    "agree on one",
                )
            if expected % 32 or not 0 < expected <= self.machine.padded:
                self.machine.fail(
                    BarrierMismatch, site, t, i,
                    f"barrier {bar} counts {expected} threads; it must be a multiple of 32 up to "
                    f"{self.machine.padded}",
                    "count whole warps",
                )  # fmt: skip
            state = self.open.get((cta, bar))
            if state is None:
                state = self.open[cta, bar] = Barrier(expected, site=site)
            if state.expected != expected:
                self.machine.fail(
                    BarrierMismatch, site, t, i,
                    f"barrier {bar} is waiting for {state.expected} threads (PTX line {state.site.line}), "
                    f"but this arrival counts {expected}",
                    "give every participant the same count",
                )  # fmt: skip
            warps = np.unique(t.warp[mine])
            brought = self.machine.shared.clocks.depart(cta, warps)
            state.brought = brought if state.brought is None else np.maximum(state.brought, brought)
            state.arrived += 32 * len(warps) if site.aligned else len(mine)
            threads = t.threads[mine]
            if site.action == "arrive":
                self.machine.push(resume, threads)
            else:
                state.waiting.append((threads, resume, site, None if value is None else value[mine]))
                state.synced.update(int(w) for w in warps)
            if state.arrived > state.expected:
                self.machine.fail(
                    BarrierMismatch, site, t, i,
                    f"{state.arrived} threads arrived at barrier {bar}, which counts {state.expected}",
                    "count every participant once",
                )  # fmt: skip
            if state.arrived == state.expected:
                self.release(cta, bar, state)
        self.machine.shared.clocks.refresh()

    def release(self, cta, bar, state) -> None:
        """Completes a barrier: the waiters have seen what every participant brought."""
        del self.open[cta, bar]
        if len(state.synced) == self.machine.warps_per_block:
            self.machine.shared.clocks.synchronise_all(np.array([cta]))
        else:
            self.machine.shared.clocks.join(cta, np.array(sorted(state.synced), np.intp), state.brought)
        reduced = [v for *_, v in state.waiting if v is not None]
        for threads, resume, site, _ in state.waiting:
            if site.action == "red":
                every = np.concatenate(reduced)
                result = {"popc": every.sum(), "and": every.all(), "or": every.any()}[site.reduce]
                self.machine.scatter(site.destination, threads, result)
            self.machine.push(resume, threads)

    def report_deadlock(self) -> None:
        """Nothing can run and a barrier waits: says which, and where everybody else is."""
        (cta, bar), state = min(self.open.items())
        threads, _, site, _ = (
            state.waiting[0] if state.waiting else (np.array([cta * self.machine.padded]), 0, state.site, None)
        )
        waiting = sorted(state.synced)
        base = cta * self.machine.padded
        gone = [
            w
            for w in range(self.machine.warps_per_block)
            if self.machine.exited[base + 32 * w : base + 32 * w + 32].all()
        ]
        elsewhere = {b: sorted(s.synced) for (c, b), s in self.open.items() if c == cta and b != bar}
        notes = f"; warps {gone} have exited" if gone else ""
        for b, warps in sorted(elsewhere.items()):
            notes += f"; warps {warps} wait at barrier {b} (PTX line {self.open[cta, b].site.line})"
        self.machine.fail(
            BarrierMismatch, site, Active(self.machine, np.sort(threads)), 0,
            f"deadlock: barrier {bar} has {state.arrived} of {state.expected} threads (warps {waiting} "
            f"wait){notes}",
            "every participant must reach the barrier, with the same id and count",
        )  # fmt: skip
