"""The implementations that a benchmark times, each as a function without arguments.

Lives here: fovea and its peers behind one interface; a peer that is not installed, or does not
take a shape, is left out and named on stderr. Invariant: all get the same tensors, in the layout
that each likes best, made before any clock runs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shapes import Shape

Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """q, k, v as (batch, seqlen, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype) -> "Inputs":
        """Return random normal inputs: zeros would draw less power and flatter every kernel."""
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(heads: int, head_dim: int) -> Tensor:
            size = (shape.B, shape.S, heads, head_dim)
            return torch.randn(size, device="cuda", dtype=dtype, generator=generator)

        return cls(
            q=normal(shape.H, shape.D),
            k=normal(shape.Hkv, shape.D),
            v=normal(shape.Hkv, shape.head_dim_v),
        )

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v as (batch, heads, seqlen, head_dim) in memory too."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        return q, k, v


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return torch's flex_attention, compiled with fixed shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    # One graph a shape and mask, as its users would have it; the default limit of 8 would fall back
    # to the uncompiled function without a word.
    torch._dynamo.config.recompile_limit = 1024
    return torch.compile(flex_attention, dynamic=False)


def fovea_forward(inputs: Inputs, shape: Shape, **keywords: Any) -> Launch:
    """Return fovea's forward on the CUDA backend."""
    import fovea

    keywords.setdefault("causal", shape.causal)
    return lambda: fovea.attention(inputs.q, inputs.k, inputs.v, backend="cuda", **keywords)


def fa3_forward(inputs: Inputs, shape: Shape) -> Launch:
    """Return FlashAttention-3's forward, from whichever package of it is installed."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        from flash_attn_interface import flash_attn_func
    return lambda: flash_attn_func(inputs.q, inputs.k, inputs.v, causal=shape.causal)


def sdpa_forward(inputs: Inputs, shape: Shape, backend: SDPBackend) -> Launch:
    """Return torch's scaled_dot_product_attention restricted to one backend."""
    q, k, v = inputs.transposed()
    is_grouped = shape.Hkv != shape.H

    def launch() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=is_grouped
            )

    return launch


def flex_forward(inputs: Inputs, shape: Shape, **keywords: Any) -> Launch:
    """Return torch's compiled flex_attention with these keywords, or causal by the shape."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = inputs.transposed()
    if not keywords and shape.causal:
        keywords["block_mask"] = create_block_mask(
            lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, shape.S, shape.S, "cuda"
        )
    flex = compiled_flex()
    return lambda: flex(q, k, v, enable_gqa=shape.Hkv != shape.H, **keywords)


FORWARD: dict[str, Callable[[Inputs, Shape], Launch]] = {
    "fovea": fovea_forward,
    "fa3": fa3_forward,
    "cudnn": lambda inputs, shape: sdpa_forward(inputs, shape, SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda inputs, shape: sdpa_forward(inputs, shape, SDPBackend.FLASH_ATTENTION),
    "flex": flex_forward,
}

# These put heads before the sequence.
_TRANSPOSED_OUTPUT = frozenset({"cudnn", "fa2", "flex"})


def ready(
    makers: dict[str, Callable[[], Launch]], *, must_have: str = "fovea"
) -> tuple[dict[str, Launch], dict[str, Tensor]]:
    """Return the launches that work and their first outputs as (batch, seqlen, heads, head_dim).

    Every launch runs once here, which also compiles it. An implementation that raises is named on
    stderr and left out, `must_have` excepted, which raises.
    """
    launches: dict[str, Launch] = {}
    outputs: dict[str, Tensor] = {}
    for name, make in makers.items():
        try:
            launch = make()
            out = launch()
            torch.cuda.synchronize()
        except Exception as error:
            if name == must_have:
                raise
            reason = str(error).strip().splitlines()
            print(
                f"  {name} left out: {type(error).__name__}: {reason[0] if reason else ''}",
                file=sys.stderr,
            )
            continue
        out = out[0] if isinstance(out, tuple) else out
        launches[name] = launch
        outputs[name] = out.transpose(1, 2) if name in _TRANSPOSED_OUTPUT else out
    return launches, outputs


def largest_difference(outputs: dict[str, Tensor], name: str = "fovea") -> dict[str, float]:
    """Return the largest absolute difference between `name` and every other output."""
    if name not in outputs:
        return {}
    mine = outputs[name].float()
    return {
        f"{name}_vs_{other}_max": round(float((mine - out.float()).abs().max()), 5)
        for other, out in outputs.items()
        if other != name
    }
