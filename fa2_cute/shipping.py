"""What ``fa2-cute compile`` makes ahead of its first call: specifications from a few words, compiled by processes."""

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from itertools import product

from . import decode_spec, jit, store, tiling
from .append_spec import ROTARY_MULTIPLE, AppendSpec
from .arch import Architecture
from .cache_spec import FIRST_OVERLAP, FP8_DTYPES, SCALE_KINDS
from .folders import require_writable
from .jit import Specification
from .spec import CAUSAL, DTYPES, FULL, MASK_DTYPES, Features

MOST_JOBS = 16  # by default: each has a compiler loaded, and needs memory for it

_WORDS = {
    "full": {"left": False, "right": False},
    "causal": {"right": True},
    "window": {"left": True, "right": True},
    **{f.name: {f.name: True} for f in fields(Features) if f.name != "mask"},
    **{f"mask={dtype}": {"mask": dtype} for dtype in MASK_DTYPES},
}


@dataclass(frozen=True)
class Wanted:
    """Which kernels, for each architecture: every dtype with every width and all features.

    widths          (head_dim, value_dim)
    kvcache         also those of KV caches, contiguous and paged, for a few queries (16 rows, query x head of a KV
                    head) and for more; the forward kernels in splits; the splits' combination; appends with and without
                    rotary embedding of whole rows
    cache_dtypes    float8 types of KV caches, besides the queries' own

    By default the kernels of ``tiling.shipped``.
    """

    dtypes: tuple[str, ...] = DTYPES
    widths: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    features: tuple[Features, ...] = (FULL, CAUSAL)
    kvcache: bool = False
    cache_dtypes: tuple[str, ...] = ()

    def specifications(self, arch: Architecture) -> list[Specification]:
        """As calls would choose them on ``arch``, each once; ValueError for one that there is not."""
        forward = [
            spec
            for dtype, (head_dim, value_dim), features in product(self.dtypes, self.widths, self.features)
            for spec in tiling.every(dtype, head_dim, value_dim, features, arch)
        ]
        return list(dict.fromkeys([*forward, *(self._of_caches(arch) if self.kvcache else ())]))

    def _of_caches(self, arch: Architecture) -> Iterator[Specification]:
        from . import splitting  # loads torch
        from .decode_checks import FIRST_FP8

        if self.cache_dtypes and arch.capability < FIRST_FP8:
            raise ValueError(f"--cache-dtype: got {self.cache_dtypes[0]}, takes none for {arch.name}: it has no float8")
        overlap = arch.capability >= FIRST_OVERLAP
        for dtype, (head_dim, value_dim) in product(self.dtypes, self.widths):
            for cache_dtype in (dtype, *self.cache_dtypes):
                scales = SCALE_KINDS if cache_dtype in FP8_DTYPES else ("unit",)
                for paged, scale in product((False, True), scales):
                    where = {"paged": paged, "overlap": overlap}
                    for decode in self._decoding(dtype, cache_dtype, head_dim, value_dim, scale, where):
                        yield decode
                        yield from (decode.combining(1), decode.combining(decode_spec.MAX_SPLITS))
                    factors = {"k_descale": scale, "v_descale": scale}
                    append = AppendSpec(dtype, cache_dtype, head_dim, value_dim, **where, **factors)
                    yield append
                    if head_dim % ROTARY_MULTIPLE == 0:
                        for interleaved in (True, False):
                            rotary = {"rotary_dim": head_dim, "rotary_dtype": dtype, "interleaved": interleaved}
                            yield replace(append, **rotary)
            # Dense calls of few queries and many keys: on these kernels, or by the forward kernel in splits.
            for decode in self._decoding(dtype, dtype, head_dim, value_dim, "unit", {"overlap": overlap}):
                yield replace(decode, every_slot=True)
            for on in self.features:
                if not on.varlen:
                    whole = tiling.choose(dtype, head_dim, value_dim, on, arch, few_blocks=True)
                    yield splitting.split_spec(whole)
                    yield from (splitting.combining(whole, splits, overlap) for splits in (1, decode_spec.MAX_SPLITS))

    def _decoding(self, dtype, cache_dtype, head_dim, value_dim, scale, where) -> Iterator[decode_spec.DecodeSpec]:
        for on in self.features:
            if on.varlen or on.mask:
                continue
            for rows in (1, 2 * decode_spec.WARP_M):
                for row_mask in {False, on.left or on.right}:
                    yield decode_spec.choose(
                        dtype,
                        cache_dtype,
                        head_dim,
                        value_dim,
                        rows,
                        row_mask=row_mask,
                        softcap=on.softcap,
                        alibi=on.alibi,
                        sink=on.sink,
                        k_scale=scale,
                        v_scale=scale,
                        **where,
                    )


def features_of(words: str) -> Features:
    """``"causal"``, ``"window+softcap"``, ...: ValueError names the words there are, or two that contradict."""
    chosen, said_by = {}, {}
    for word in words.split("+"):
        if word not in _WORDS:
            raise ValueError(f"--features: got {words!r}, takes words joined by +, of {', '.join(_WORDS)}")
        for option, value in _WORDS[word].items():
            if chosen.setdefault(option, value) != value:
                raise ValueError(f"--features: got {words!r}, takes {said_by[option]} or {word}, not both")
            said_by.setdefault(option, word)
    try:
        return Features(**chosen)
    except ValueError as error:  # options that do not go together
        raise ValueError(f"--features: got {words!r}: {error}") from None


def widths_of(text: str) -> tuple[int, int]:
    """``"128"`` or ``"192x128"`` as (head_dim, value_dim)."""
    head_dim, both, value_dim = text.partition("x")
    try:
        return int(head_dim), int(value_dim if both else head_dim)
    except ValueError:
        raise ValueError(f"--head-dim: got {text!r}, takes a number, or HEAD_DIMxVALUE_DIM such as 192x128") from None


def check_folder(name: str, where: store.Store, wanted: Sequence[tuple[Specification, Architecture]]):
    """Raises OSError unless all of ``wanted`` can be put into ``where``, or is there: before minutes of compiling.

    ``name``: what the folder was given by.
    """
    if not all(_is_kept(spec, arch, where) for spec, arch in wanted):
        require_writable(name, where.folder)


def compile_all(
    wanted: Sequence[tuple[Specification, Architecture]], where: store.Store, jobs: int | None = None
) -> Iterator[tuple[Specification, Architecture]]:
    """Put all into ``where`` that it has not yet, by ``jobs`` processes (by default ``cores()``), and yield each.

    Raises OSError where a kernel cannot be kept in ``where``, or a process dies.
    """
    jobs = min(jobs or cores(), len(wanted))
    if jobs <= 1:
        for spec, arch in wanted:
            _make(spec, arch, where)
            yield spec, arch
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_quieten) as pool:
        try:
            made = {pool.submit(_make, spec, arch, where): (spec, arch) for spec, arch in wanted}
            for done in as_completed(made):
                done.result()
                yield made[done]
        except BrokenProcessPool as error:
            raise OSError(f"--jobs: got {jobs}, takes fewer: a process died, of too little memory perhaps") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def cores() -> int:
    """Cores that this process may use, at most ``MOST_JOBS``: a container has fewer than its host."""
    return min(len(os.sched_getaffinity(0)), MOST_JOBS)


def _make(spec: Specification, arch: Architecture, where: store.Store):
    jit.obtain(spec, arch, where)
    if not _is_kept(spec, arch, where):  # worth a warning to a call, but here nothing else is wanted
        raise OSError(
            f"compiled kernels cannot be kept in {where.folder}: --into (FA2_CUTE_CACHE) takes a folder that can be "
            "written to, on a disk with space left"
        )


def _is_kept(spec: Specification, arch: Architecture, where: store.Store) -> bool:
    return where.load(jit.entry_name(spec, arch)) is not None


def _quieten():
    """In a process of several: the one that started them says what is compiled."""
    logging.getLogger("fa2_cute").setLevel(logging.ERROR)
