"""A paged KV cache for many sequences: which page belongs to whom, on the host; the pages themselves, on the device.

The host keeps lists of pages, lengths and reference counts, and never reads the device. A page may belong to several
sequences (a shared prefix); who writes to a page that others share gets a copy of it first.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .cache_checks import FP8_DTYPES
from .descale import normalise
from .kvcache import append_to_kvcache, flash_attn_with_kvcache
from .problem import DTYPES


class OutOfPages(RuntimeError):
    """A request needs more pages than are free; nothing was taken. ``needed`` and ``free`` say how many."""

    def __init__(self, needed: int, free: int, pages: int):
        super().__init__(f"pages: got a request for {needed}, takes at most the {free} that are free of {pages}")
        self.needed, self.free = needed, free


@dataclass
class _Entry:
    """A sequence: its pages in order, and how many tokens they hold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedKVCache:
    """Keys and values of many sequences in pages of ``page_size`` tokens.

        cache = PagedKVCache(pages=1024, page_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
        a = cache.allocate()
        out = cache.attend([a], q, k, v, causal=True)     # prefill: (1, prompt, heads, head_dim)
        b = cache.fork(a)                                 # shares a's pages
        out = cache.attend([a, b], q, k, v, causal=True)  # decode: (2, 1, heads, head_dim)
        cache.free(a)

    Sequences are named by integers that are never used again. Calls are in order on one CUDA stream; no thread safety.
    What tells the device where tokens are is made on the host, anew for each call, so calls are refused (RuntimeError)
    while a CUDA graph is captured: a replay would repeat this call's pages and lengths. docs/serving.md says how to
    capture a step.

    Arguments:
        pages, page_size: how many, and tokens in each.
        kv_heads, head_dim, value_dim: of a token; value_dim is head_dim by default.
        dtype: float16, bfloat16, float8_e4m3fn or float8_e5m2.
        device: where the pages are.
        k_descale, v_descale: with FP8, float32 (), (1,) or (kv_heads,) on that device: a stored element stands for
            itself times this. By default 1.
    Raises TypeError or ValueError for what is not taken.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "pages": pages,
            "page_size": page_size,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
        }
        for name, size in sizes.items():
            _check_count(name, size, 1)
        if dtype not in (*DTYPES, *FP8_DTYPES):
            takes = ", ".join(map(str, (*DTYPES, *FP8_DTYPES)))
            raise TypeError(f"dtype: got {dtype!r}, takes one of {takes}")
        self.page_size = page_size
        #: (pages, page_size, kv_heads, head_dim or value_dim); unused slots may hold anything.
        self.k = torch.empty((pages, page_size, kv_heads, head_dim), dtype=dtype, device=device)
        self.v = torch.empty((pages, page_size, kv_heads, value_dim), dtype=dtype, device=device)
        for name, factors in (("k_descale", k_descale), ("v_descale", v_descale)):
            normalise(name, factors, self.k, batch=1, paged=True)
            if factors is not None and factors.dim() > 1:
                raise ValueError(f"{name}: got shape {tuple(factors.shape)}, takes (), (1,) or (kv_heads={kv_heads},)")
        self.k_descale, self.v_descale = k_descale, v_descale
        self._entries: dict[int, _Entry] = {}
        self._owners = [0] * pages  # of each page: how many sequences it belongs to
        self._free = list(range(pages - 1, -1, -1))
        self._next_name = 0

    @property
    def pages(self) -> int:
        return self.k.shape[0]

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences there are, the oldest first."""
        return tuple(self._entries)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._entry(sequence).length

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in order."""
        return tuple(self._entry(sequence).pages)

    def pages_needed(self, sequences: Sequence[int], new_tokens: int) -> int:
        """Free pages that ``new_tokens`` more tokens for each of ``sequences`` would take, for copies included."""
        entries = self._entries_of(sequences)
        _check_count("new_tokens", new_tokens, 0)
        copies = self._to_copy(entries) if new_tokens else []
        return len(copies) + sum(self._missing(entry, new_tokens) for entry in entries)

    def allocate(self, tokens: int = 0) -> int:
        """A new sequence without tokens, with pages for ``tokens`` set aside. Raises OutOfPages."""
        _check_count("tokens", tokens, 0)
        entry = _Entry()
        self._take(entry, -(-tokens // self.page_size))
        return self._named(entry)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first ``length`` tokens of another (by default all): it shares pages."""
        parent = self._entry(sequence)
        length = parent.length if length is None else length
        _check_count("length", length, 0)
        if length > parent.length:
            raise ValueError(f"length: got {length}, takes at most the {parent.length} tokens of sequence {sequence}")
        shared = parent.pages[: -(-length // self.page_size)]
        for page in shared:
            self._owners[page] += 1
        return self._named(_Entry(list(shared), length))

    def truncate(self, sequence: int, length: int):
        """Forget the tokens of a sequence from ``length`` on (rejected drafts, say), and give back their pages."""
        entry = self._entry(sequence)
        _check_count("length", length, 0)
        if length > entry.length:
            raise ValueError(f"length: got {length}, takes at most the {entry.length} tokens of sequence {sequence}")
        self._cut(entry, -(-length // self.page_size))
        entry.length = length

    def free(self, sequence: int):
        """Give back the pages of a sequence; those that it shares stay with the others."""
        self._release(self._entry(sequence).pages)
        del self._entries[sequence]

    def reserve(self, sequences: Sequence[int], new_tokens: int):
        """Make room for ``new_tokens`` more tokens of each sequence: pages of their own, copies where they share.

        Raises OutOfPages, and then has taken none.
        """
        self._refuse_capture()
        needed = self.pages_needed(sequences, new_tokens)
        if needed > self.free_pages:
            raise OutOfPages(needed, self.free_pages, self.pages)
        if not new_tokens:
            return
        entries = self._entries_of(sequences)
        self._copy_shared(self._to_copy(entries))
        for entry in entries:
            self._take(entry, self._missing(entry, new_tokens))

    def append(self, sequences: Sequence[int], k: torch.Tensor, v: torch.Tensor, **rotary):
        """Append new_len tokens to each of n sequences, without attending.

        k (n, new_len, kv_heads, head_dim), v (n, new_len, kv_heads, value_dim); rotary_cos, rotary_sin and
        rotary_interleaved as in ``flash_attn_with_kvcache``. Raises OutOfPages before anything is appended, or
        TypeError and ValueError as that does.
        """
        with self._reserved(sequences, k.shape[1]):
            append_to_kvcache(self.k, self.v, k, v, self.lengths(sequences), **self._where(sequences), **rotary)
        self._grow(sequences, k.shape[1])

    def attend(
        self,
        sequences: Sequence[int],
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        **options,
    ):
        """``flash_attn_with_kvcache`` for n sequences, of which each has query_len queries and new_len new tokens.

        q (n, query_len, heads, head_dim); k, v (n, new_len, kv_heads, ...) or None. options: causal, window_size,
        rotary_cos and so
        on. Returns what that function returns. Raises OutOfPages before anything is appended.
        """
        new_len = 0 if k is None else k.shape[1]
        with self._reserved(sequences, new_len):
            result = flash_attn_with_kvcache(
                q,
                self.k,
                self.v,
                k,
                v,
                cache_seqlens=self.lengths(sequences),
                **self._where(sequences),
                **options,
            )
        self._grow(sequences, new_len)
        return result

    @contextlib.contextmanager
    def _reserved(self, sequences: Sequence[int], new_tokens: int) -> Iterator[None]:
        """``reserve`` for a call that may be refused: then the pages that it was given room in are free again."""
        entries = self._entries_of(sequences)
        held = [len(entry.pages) for entry in entries]
        self.reserve(sequences, new_tokens)
        try:
            yield
        except (TypeError, ValueError, NotImplementedError):
            for entry, pages in zip(entries, held, strict=True):
                self._cut(entry, pages)
            raise

    def _cut(self, entry: _Entry, pages: int):
        """Give back what an entry has beyond its first ``pages`` pages."""
        self._release(entry.pages[pages:])
        del entry.pages[pages:]

    def lengths(self, sequences: Sequence[int]) -> torch.Tensor:
        """(n,) int32 on the device: tokens of each sequence."""
        self._refuse_capture()
        return self._on_device([entry.length for entry in self._entries_of(sequences)], torch.int32)

    def block_table(self, sequences: Sequence[int]) -> torch.Tensor:
        """(n, pages of the longest, at least 1) int32 on the device; -1 past the pages of a sequence."""
        self._refuse_capture()
        tables = [entry.pages for entry in self._entries_of(sequences)]
        width = max([1, *map(len, tables)])
        rows = [pages + [-1] * (width - len(pages)) for pages in tables]
        return self._on_device(rows, torch.int32).view(len(rows), width)

    def _where(self, sequences: Sequence[int]) -> dict[str, torch.Tensor | None]:
        """The arguments that tell the kernels where tokens are and what they stand for."""
        return {
            "block_table": self.block_table(sequences),
            "k_descale": self.k_descale,
            "v_descale": self.v_descale,
        }

    def _grow(self, sequences: Sequence[int], new_tokens: int):
        for entry in self._entries_of(sequences):
            entry.length += new_tokens

    def _entry(self, sequence: int) -> _Entry:
        entry = self._entries.get(sequence)
        if entry is None:
            raise ValueError(f"sequence: got {sequence!r}, takes one of the {len(self._entries)} that there are")
        return entry

    def _entries_of(self, sequences: Sequence[int]) -> list[_Entry]:
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"sequences: got {list(sequences)}, takes each at most once")
        return [self._entry(sequence) for sequence in sequences]

    def _named(self, entry: _Entry) -> int:
        name, self._next_name = self._next_name, self._next_name + 1
        self._entries[name] = entry
        return name

    def _missing(self, entry: _Entry, new_tokens: int) -> int:
        """Pages that an entry lacks for ``new_tokens`` more tokens."""
        return max(-(-(entry.length + new_tokens) // self.page_size) - len(entry.pages), 0)

    def _to_copy(self, entries: list[_Entry]) -> list[_Entry]:
        """Those whose next token goes to a page that others own too. Only that page can be shared: a fork shares no
        page past its last token's. The last of the owners writes to the page itself."""
        copies, leaving = [], {}
        for entry in entries:
            index = entry.length // self.page_size
            if index < len(entry.pages):
                page = entry.pages[index]
                if self._owners[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    copies.append(entry)
        return copies

    def _copy_shared(self, entries: list[_Entry]):
        """Give each entry a copy of its own of the page that its next token goes to."""
        sources, targets = [], []
        for entry in entries:
            index = entry.length // self.page_size
            sources.append(entry.pages[index])
            self._take(entry, 1)
            entry.pages[index] = entry.pages.pop()
            targets.append(entry.pages[index])
        if entries:
            source, target = self._on_device(sources), self._on_device(targets)
            for pages in (self.k, self.v):
                as_bytes = pages.view(torch.uint8)  # index_copy_ knows no FP8
                as_bytes.index_copy_(0, target, as_bytes.index_select(0, source))
        self._release(sources)

    def _take(self, entry: _Entry, count: int):
        """``count`` free pages at the end of an entry."""
        if count > self.free_pages:
            raise OutOfPages(count, self.free_pages, self.pages)
        for _ in range(count):
            page = self._free.pop()
            self._owners[page] = 1
            entry.pages.append(page)

    def _release(self, pages: list[int]):
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _refuse_capture(self):
        if self.k.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "PagedKVCache: got a call while a CUDA graph is captured, takes calls outside of one: append before a "
                "replay, and capture flash_attn_with_kvcache on the pages k and v, with tensors for block_table and "
                "lengths that are filled in before each replay"
            )

    def _on_device(self, numbers: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Host numbers as a device tensor, without waiting for the device."""
        tensor = torch.tensor(numbers, dtype=dtype)
        if self.k.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.k.device, non_blocking=True)


def _check_count(name: str, count: int, least: int):
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name}: got {count!r}, takes an integer")
    if count < least:
        raise ValueError(f"{name}: got {count}, takes {least} or more")
