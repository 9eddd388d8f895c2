"""FlashAttention-2 for consumer Blackwell (sm_120), written in NVIDIA's CuTe DSL.

    from fa2_cute import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)     # (batch, length, heads, head_dim), float16 or bfloat16

CUDA tensors run on their GPU; CPU tensors run the sm_120a code of the same kernel in ``fa2_cute.emulator``.
Names are loaded on first use, so that importing the package costs nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "flash_attn_func": "attention",
    "flash_attn_kvpacked_func": "attention",
    "flash_attn_qkvpacked_func": "attention",
    "flash_attn_varlen_func": "attention",
    "flash_attn_varlen_kvpacked_func": "attention",
    "flash_attn_varlen_qkvpacked_func": "attention",
    "flash_attn_with_kvcache": "kvcache",
    "append_to_kvcache": "kvcache",
    "quantize_kv": "quantize",
    "PagedKVCache": "serving",
    "scaled_dot_product_attention": "sdpa",
    "sdpa_kernel": "sdpa",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(__all__))
