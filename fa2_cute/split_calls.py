"""Dense calls whose keys several blocks share: which those are, and what they launch.

The forward kernel's blocks share the keys of a tile, or those of the kernels for KV caches do (splitting.py); a
combination of what they leave follows.
"""

from dataclasses import dataclass, replace

import torch

from . import decode, decode_checks, forward, splitting
from .arch import Architecture
from .cache_spec import FIRST_OVERLAP, MAX_INT32
from .checks import LOG2_E
from .decode_spec import MAX_SPLITS
from .forward import SPLIT_KEYS, Call, Options
from .launch import Launch, Recording, record
from .problem import Problem
from .spec import MAX_GRID_YZ
from .splitting import CACHE, FORWARD, Division, Keys

# Calls of at most so many queries, heads of a KV head counted, always go to the kernels for KV caches where those can
# take them: a tile of queries there is 64 rows.
SPLIT_ROWS = 64


@dataclass(frozen=True, eq=False)
class SplitCall:
    """A call's launches, in order, and its results, which they write."""

    launches: tuple[Launch, ...]
    out: torch.Tensor
    lse: torch.Tensor
    arch: Architecture

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), computed."""
        for launch in self.launches:
            launch.run(self.arch)
        return self.out, self.lse

    def recorded(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Recording | None:
        """The launches, to be repeated unchecked on tensors like q, k, v, which this call was made of; None where that
        cannot be (launch.py)."""
        return record(self.launches, (q, k, v), (self.out, self.lse), self.arch)


def plan(problem: Problem, options: Options, inputs: tuple[torch.Tensor, ...]) -> SplitCall | None:
    """A checked call (``forward.check``) in splits if that is how it is computed best; None: whole."""
    able = kernels_that_split(problem, inputs)
    if not able:
        return None
    device = inputs[0].device
    division = divide(problem, options.window, forward.architecture_of(device), decode_checks.sms(device), able)
    if division.kernels == CACHE:
        return split_cache(options, inputs)
    return split_forward(problem, options, inputs, division.splits) if division.splits > 1 else None


def kernels_that_split(problem: Problem, inputs: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """Which kernels can compute a checked call in splits.

    None of them packed sequences; those for KV caches no mask, and nothing beyond what they count in 32 bits. In the
    emulator, which leaves no SM idle, the forward kernel is not split.
    """
    able = []
    if not problem.features.varlen and problem.query_len and problem.heads and problem.batch:
        if inputs[0].is_cuda and forward_splits(problem):
            able.append(FORWARD)
        if not problem.features.mask and decode_checks.takes(*inputs):
            able.append(CACHE)
    return tuple(able)


def forward_splits(problem: Problem) -> bool:
    """Whether the forward kernel can compute a call that is not empty in splits: a split's part of the output is
    addressed in 32 bits."""
    elements = problem.batch * problem.query_len * problem.heads * problem.value_dim
    return not problem.features.varlen and elements <= MAX_INT32 and problem.batch <= MAX_GRID_YZ


def divide(
    problem: Problem, window: tuple[int | None, int | None], arch: Architecture, sms: int, able: tuple[str, ...]
) -> Division:
    """Which kernels compute a call, ``able`` being those that can split it, on a GPU of ``sms`` SMs.

    Where the queries of the heads that share a KV head fill no more than a tile of the kernels for KV caches, those
    read K and V once for them. Else what is fastest by a model of the time (splitting.py).
    """
    whole = Division(FORWARD, 1)
    if problem.key_len < SPLIT_KEYS or not able:
        return whole
    if CACHE in able and problem.query_len * (problem.heads // problem.kv_heads) <= SPLIT_ROWS:
        return Division(CACHE, 0)
    keys = keys_seen(problem, window)
    return whole if keys.mean < SPLIT_KEYS else splitting.divide(problem, keys, arch, sms, able)


def keys_seen(problem: Problem, window: tuple[int | None, int | None]) -> Keys:
    """How many keys the queries see: the middle one, about the mean, and of it and the last the one that sees more."""
    left, right = window

    def seen(query: int) -> int:
        at = query + problem.key_len - problem.query_len
        first = 0 if left is None else max(at - left, 0)
        end = problem.key_len if right is None else min(at + right + 1, problem.key_len)
        return max(end - first, 0)

    mean = seen(problem.query_len // 2)
    return Keys(mean, max(mean, seen(problem.query_len - 1)))


def split_forward(problem: Problem, options: Options, inputs: tuple[torch.Tensor, ...], splits: int) -> SplitCall:
    """A checked call, neither empty nor packed, by the forward kernel, ``splits`` of whose blocks share a tile's keys.

    Their parts, float32, are allocated here: the output as often, and two numbers a row.
    """
    q = inputs[0]
    out, lse, _ = forward.allocated(problem, options, inputs)
    rows = problem.batch * problem.query_len * problem.heads
    partial_out = torch.empty((splits, rows, problem.value_dim), dtype=torch.float32, device=q.device)
    partial_state = torch.empty((splits, rows, 2), dtype=torch.float32, device=q.device)
    # The combination adds the sink.
    call = Call(problem, (*inputs, partial_out, partial_state), replace(options, learnable_sink=None))
    architecture = forward.architecture_of(q.device)
    whole = call.spec(architecture, few_blocks=True)
    spec = splitting.split_spec(whole)
    combine = splitting.combining(whole, splits, architecture.capability >= FIRST_OVERLAP)
    grid = spec.grid(problem.batch, problem.heads, problem.query_len, splits)
    attending = Launch(spec, grid, -(-forward.key_tiles(problem, spec) // splits), call.values())
    values = (partial_out, partial_state, out, lse, options.learnable_sink, LOG2_E)
    return SplitCall((attending, Launch(combine, combine.grid(rows), 0, values)), out, lse, architecture)


def split_cache(options: Options, inputs: tuple[torch.Tensor, ...]) -> SplitCall:
    """A checked call by the kernels for KV caches, in as many splits as they choose; every slot is a key."""
    q, k, v = inputs
    prepared = decode.prepare(
        q,
        k,
        v,
        softmax_scale=options.softmax_scale,
        window=options.window,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sink=options.learnable_sink,
        every_slot=True,
    )
    out, lse = prepared.allocated(q)
    return SplitCall(tuple(prepared.launches(q, None, out, lse)), out, lse, prepared.choice.arch)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, splits: int, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``forward.attend`` of a dense call by the forward kernel in ``splits`` splits, whatever is faster.

    Arguments, results and errors as there; and TypeError for a number of splits that is no integer, ValueError for one
    that is not from 1 to MAX_SPLITS, for packed sequences, for a call without a key or a query, or with more than
    2^31 - 1 elements of the output.
    """
    if isinstance(splits, bool) or not isinstance(splits, int):
        raise TypeError(f"splits: got {splits!r}, takes an integer")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: got {splits}, takes 1 to {MAX_SPLITS}")
    problem, options, inputs = forward.check(q, k, v, **options)
    size = (problem.batch, problem.query_len, problem.heads, problem.value_dim)
    if not forward_splits(problem) or 0 in (*size, problem.key_len):
        raise ValueError(
            f"splits: got {splits} with an output of {size} on {problem.key_len} keys"
            f"{', packed' if problem.features.varlen else ''}, takes calls that are neither empty nor packed, of less "
            f"than 2^31 elements of the output in at most {MAX_GRID_YZ} sequences"
        )
    return split_forward(problem, options, inputs, splits).run()
