"""The paged cache against lists of tokens: contents, who owns which page, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fa2_cute.serving import OutOfPages, PagedKVCache

PAGES, PAGE_SIZE = 9, 4


def small_cache(**options):
    return PagedKVCache(PAGES, PAGE_SIZE, kv_heads=1, head_dim=8, value_dim=16, dtype=torch.bfloat16, **options)


def tokens_of(cache, name):
    """The tokens of a sequence, read page by page; keys and values must agree."""
    keys = cache.k[list(cache.pages_of(name))].reshape(-1, 8)[: cache.length(name)]
    values = cache.v[list(cache.pages_of(name))].reshape(-1, 16)[: cache.length(name)]
    assert (keys == keys[:, :1]).all()
    assert (values == -keys[:, :1]).all()
    return keys[:, 0].int().tolist()


def append(cache, names, tokens):
    """Append a list of token numbers (below 256: bfloat16 holds them) for each sequence."""
    numbers = torch.tensor(tokens).view(len(names), -1, 1, 1).bfloat16()
    cache.append(names, numbers.repeat(1, 1, 1, 8), -numbers.repeat(1, 1, 1, 16))


class Serving(RuleBasedStateMachine):
    """``model`` holds the tokens of each sequence, ``pages`` how many pages it must have."""

    def __init__(self):
        super().__init__()
        self.cache = small_cache()
        self.model: dict[int, list[int]] = {}
        self.pages: dict[int, int] = {}
        self.next_token = 0

    def new_token(self):
        self.next_token = (self.next_token + 1) % 256
        return self.next_token

    @rule(tokens=st.integers(0, 10))
    def allocate(self, tokens):
        needed, free = -(-tokens // PAGE_SIZE), self.cache.free_pages
        if needed > free:
            with pytest.raises(OutOfPages) as caught:
                self.cache.allocate(tokens)
            assert (caught.value.needed, caught.value.free) == (needed, free)
            return
        name = self.cache.allocate(tokens)
        assert name not in self.model
        self.model[name], self.pages[name] = [], needed

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 6))
    def append(self, data, count):
        names = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3, unique=True))
        new = [[self.new_token() for _ in range(count)] for _ in names]
        needed, free = self.cache.pages_needed(names, count), self.cache.free_pages
        if needed > free:
            with pytest.raises(OutOfPages) as caught:
                append(self.cache, names, new)
            assert (caught.value.needed, caught.value.free) == (needed, free)
            assert str(free) in str(caught.value)
            return
        append(self.cache, names, new)
        assert self.cache.free_pages == free - needed
        for name, tokens in zip(names, new, strict=True):
            self.model[name] += tokens
            self.pages[name] = max(self.pages[name], -(-len(self.model[name]) // PAGE_SIZE))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.none() | st.integers(0, len(self.model[parent])))
        free = self.cache.free_pages
        name = self.cache.fork(parent, length)
        assert name not in self.model
        assert self.cache.free_pages == free
        self.model[name] = self.model[parent][:length]
        self.pages[name] = -(-len(self.model[name]) // PAGE_SIZE)
        assert self.cache.pages_of(name) == self.cache.pages_of(parent)[: self.pages[name]]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[name])))
        self.cache.truncate(name, length)
        del self.model[name][length:]
        self.pages[name] = -(-length // PAGE_SIZE)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.free(name)
        del self.model[name], self.pages[name]

    @invariant()
    def every_sequence_holds_its_tokens(self):
        assert self.cache.sequences == tuple(self.model)
        for name, tokens in self.model.items():
            assert tokens_of(self.cache, name) == tokens
            assert len(self.cache.pages_of(name)) == self.pages[name]

    @invariant()
    def every_page_is_free_or_owned(self):
        owned = {page for name in self.model for page in self.cache.pages_of(name)}
        assert self.cache.free_pages == PAGES - len(owned)
        for name in self.model:
            assert len(set(self.cache.pages_of(name))) == len(self.cache.pages_of(name))


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_copy_on_write_takes_one_page_for_all_but_the_last_owner():
    cache = small_cache()
    first = cache.allocate()
    append(cache, [first], [[1, 2, 3, 4, 5]])
    second, third = cache.fork(first), cache.fork(first)
    assert cache.free_pages == PAGES - 2
    assert cache.pages_needed([first, second, third], 1) == 2
    append(cache, [first, second, third], [[6], [7], [8]])
    assert cache.free_pages == PAGES - 4
    assert [tokens_of(cache, name)[-2:] for name in (first, second, third)] == [[5, 6], [5, 7], [5, 8]]
    assert len({cache.pages_of(name)[0] for name in (first, second, third)}) == 1


def test_a_full_page_is_shared_without_a_copy():
    cache = small_cache()
    first = cache.allocate()
    append(cache, [first], [[1, 2, 3, 4]])
    second = cache.fork(first)
    assert cache.pages_needed([first, second], 1) == 2  # a new page each, no copies
    append(cache, [second], [[9]])
    assert cache.pages_of(second)[0] == cache.pages_of(first)[0]


def test_the_table_and_the_lengths():
    cache = small_cache()
    first, second, third = cache.allocate(), cache.allocate(), cache.allocate()
    append(cache, [first], [[1, 2, 3, 4, 5]])
    append(cache, [second], [[6]])
    table = cache.block_table([second, first, third])
    assert table.dtype == torch.int32
    assert table.tolist() == [[*cache.pages_of(second), -1], list(cache.pages_of(first)), [-1, -1]]
    assert cache.lengths([second, first, third]).tolist() == [1, 5, 0]


def test_fp8_pages_quantise_on_the_way_in_and_are_copied_for_a_writer():
    factor = torch.tensor([0.5])
    cache = PagedKVCache(4, 4, 1, 16, dtype=torch.float8_e4m3fn, k_descale=factor, v_descale=factor / 2)
    first = cache.allocate()
    k = torch.arange(3.0).view(1, 3, 1, 1).repeat(1, 1, 1, 16).bfloat16()
    cache.append([first], k, k)
    second = cache.fork(first)
    cache.append([second], k[:, 1:2], k[:, 1:2])
    page = cache.pages_of(second)[0]
    assert page != cache.pages_of(first)[0]
    assert cache.k[page, :4, 0, 0].float().tolist() == [0.0, 2.0, 4.0, 2.0]
    assert cache.v[page, :4, 0, 0].float().tolist() == [0.0, 4.0, 8.0, 4.0]


def test_names_are_never_used_again():
    cache = small_cache()
    first = cache.allocate()
    cache.free(first)
    assert cache.allocate() != first
    with pytest.raises(ValueError, match=r"sequence: got 0, takes one of"):
        cache.length(first)


@pytest.mark.parametrize(
    ("kind", "start", "call"),
    [
        (ValueError, "sequence: got 7", lambda cache, name: cache.free(7)),
        (ValueError, "sequence: got 7", lambda cache, name: cache.block_table([name, 7])),
        (ValueError, "sequences: got [0, 0]", lambda cache, name: cache.lengths([name, name])),
        (ValueError, "length: got 3", lambda cache, name: cache.fork(name, 3)),
        (ValueError, "length: got -1", lambda cache, name: cache.fork(name, -1)),
        (ValueError, "length: got 3", lambda cache, name: cache.truncate(name, 3)),
        (TypeError, "length: got 1.0", lambda cache, name: cache.truncate(name, 1.0)),
        (TypeError, "tokens: got True", lambda cache, name: cache.allocate(True)),
        (ValueError, "new_tokens: got -2", lambda cache, name: cache.reserve([name], -2)),
        (ValueError, "page_size: got 0", lambda cache, name: PagedKVCache(1, 0, 1, 8, dtype=torch.float16)),
        (TypeError, "dtype: got torch.float32", lambda cache, name: PagedKVCache(1, 1, 1, 8, dtype=torch.float32)),
        (TypeError, "pages: got None", lambda cache, name: PagedKVCache(None, 1, 1, 8, dtype=torch.float16)),
        (
            ValueError,
            "k_descale: got shape (1, 1)",
            lambda cache, name: PagedKVCache(
                1, 1, 1, 8, dtype=torch.float8_e5m2, k_descale=torch.ones(1, 1), v_descale=None
            ),
        ),
        (
            ValueError,
            "v_descale: got one with a cache of torch.float16",
            lambda cache, name: PagedKVCache(1, 1, 1, 8, dtype=torch.float16, v_descale=torch.ones(())),
        ),
    ],
)
def test_refuses_and_changes_nothing(kind, start, call):
    cache = small_cache()
    name = cache.allocate()
    append(cache, [name], [[1, 2]])
    with pytest.raises(kind) as caught:
        call(cache, name)
    assert str(caught.value).startswith(start)
    assert "takes" in str(caught.value)
    assert tokens_of(cache, name) == [1, 2]
    assert cache.free_pages == PAGES - 1


def test_no_call_while_a_graph_is_captured(monkeypatch):
    cache = small_cache()
    first = cache.allocate(3)
    append(cache, [first], [[1, 2, 3]])
    owned, free = cache.pages_of(first), cache.free_pages
    pages = cache.k
    cache.k = SimpleNamespace(is_cuda=True, shape=pages.shape)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    token = torch.zeros(1, 1, 1, 8).half()
    calls = (
        lambda: cache.lengths([first]),
        lambda: cache.block_table([first]),
        lambda: cache.reserve([first], 9),
        lambda: cache.append([first], token, token),
        lambda: cache.attend([first], token, token, token),
        lambda: cache.attend([first], token),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^PagedKVCache: got a call while a CUDA graph is captured, takes"):
            call()
    assert (cache.pages_of(first), cache.free_pages, cache.length(first)) == (owned, free, 3)
    cache.k = pages
    cache.reserve([first], 9)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (None, torch.zeros(1, 5, 1, 8), torch.zeros(1, 5, 1, 16)),
        (None, torch.zeros(1, 5, 2, 8).bfloat16(), torch.zeros(1, 5, 2, 16).bfloat16()),
        (torch.zeros(1, 5, 3, 8), torch.zeros(1, 5, 1, 8).bfloat16(), torch.zeros(1, 5, 1, 16).bfloat16()),
    ],
    ids=["dtype", "heads", "queries"],
)
def test_a_refused_call_keeps_no_page(q, k, v):
    cache = small_cache()
    name = cache.allocate()
    append(cache, [name], [[1, 2, 3]])
    pages, free = cache.pages_of(name), cache.free_pages
    call = (cache.append, [name], k, v) if q is None else (cache.attend, [name], q, k, v)
    with pytest.raises((TypeError, ValueError)):
        call[0](*call[1:])
    assert (cache.pages_of(name), cache.free_pages, cache.length(name)) == (pages, free, 3)
