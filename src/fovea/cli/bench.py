"""`fovea bench`: one call, timed beside torch's attention on this machine.

Lives here: which peers compute the same call, and the table. Published figures come from
`benchmarks/`, which also keeps clocks and power. Invariant: every row computes the same result.
"""

from collections.abc import Callable
from typing import Annotated, Any, cast

import torch
import typer
from rich.table import Table
from torch import Tensor

import fovea
from fovea.cli import peers
from fovea.cli.call import Call
from fovea.cli.console import output
from fovea.cli.options import (
    Backend,
    Causal,
    MaskMod,
    ScoreMod,
    Softcap,
    Window,
    Words,
    read_call,
)
from fovea.cli.timing import Timing, ratio_text, time_interleaved

Backward = Annotated[bool, typer.Option("--backward", help="Time forward and backward.")]


def run(
    call: Words = None,
    causal: Causal = None,
    window: Window = None,
    softcap: Softcap = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    backend: Backend = None,
    backward: Backward = False,
) -> None:
    """Time a call beside torch's attention functions, in turns, and print the medians.

    A mask mod is turned into a block mask for every implementation, outside the timing.
    """
    wanted = read_call(call, causal, window, softcap, (score_mod, mask_mod))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v = wanted.make_inputs(device)
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)
    calls = _calls((q, k, v), wanted, backend)
    if backward:
        dout = torch.randn_like(calls["fovea"]())
        calls = {name: _with_backward(call, (q, k, v), dout) for name, call in calls.items()}
    timings = time_interleaved(calls, device)
    console = output()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    passes = "forward + backward" if backward else "forward"
    console.print(f"{wanted}, {passes}, {name}, torch {torch.__version__}")
    console.print(_table(timings, _num_flops(wanted, backward=backward)))
    if len(calls) == 1:
        console.print(f"no peer: {_why_alone(wanted, device)}")


def _calls(
    inputs: tuple[Tensor, Tensor, Tensor], wanted: Call, backend: str | None
) -> dict[str, Callable[[], Tensor]]:
    q, k, v = inputs
    keywords = wanted.with_block_mask(q.device).keywords
    attention = cast(Callable[..., Tensor], fovea.attention)  # keywords from a dict
    calls: dict[str, Callable[[], Tensor]] = {
        "fovea": lambda: attention(q, k, v, backend=backend, **keywords)
    }
    if not wanted.has_mods:
        sdpa = peers.sdpa(q, k, v, causal=wanted.keywords.get("causal", False))
        if sdpa is not None:
            calls["torch sdpa"] = sdpa
    if q.is_cuda or not q.requires_grad:  # torch's flex_attention has no gradients on a CPU
        name = "torch flex, compiled" if q.is_cuda else "torch flex, uncompiled"
        calls[name] = peers.flex(q, k, v, **_for_flex(wanted, q.device), compiled=q.is_cuda)
    return calls


def _why_alone(wanted: Call, device: torch.device) -> str:
    """Return why no function of torch's is timed beside a call."""
    scope = (
        "takes no mods, window or softcap here"
        if wanted.has_mods
        else "aligns causal masks top left (--causal-top-left)"
    )
    return (
        f"torch's scaled_dot_product_attention {scope}, and its flex_attention has no gradients "
        f"on a {device.type.upper()}; leave out --backward to time the forward beside it"
    )


def _for_flex(wanted: Call, device: torch.device) -> dict[str, Any]:
    """Return what flex_attention takes instead of fovea's keywords."""
    keywords, shape = wanted.keywords, wanted.shape
    softcap, mod = keywords.get("softcap"), keywords.get("score_mod")
    left, right = keywords.get("window", (None, None))
    causal, own_mask = keywords.get("causal"), keywords.get("mask_mod")
    right = min(right or 0, 0) if causal else right
    offset = 0 if causal == "top_left" else shape.seqlen_kv - shape.seqlen_q

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        return score if mod is None else mod(score, b, h, q_idx, kv_idx)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        ahead = kv_idx - (q_idx + offset)
        visible = ahead == ahead
        visible = visible if left is None else visible & (ahead >= -left)
        visible = visible if right is None else visible & (ahead <= right)
        return visible if own_mask is None else visible & own_mask(b, h, q_idx, kv_idx)

    masked = own_mask is not None or left is not None or right is not None
    lengths = (shape.seqlen_q, shape.seqlen_kv)
    blocks = fovea.create_block_mask(mask_mod, None, None, *lengths, device) if masked else None
    return {
        "score_mod": None if softcap is None and mod is None else score_mod,
        "block_mask": blocks,
    }


def _with_backward(
    call: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor
) -> Callable[[], object]:
    def run_both() -> object:
        return torch.autograd.grad(call(), inputs, dout)

    return run_both


def _num_flops(wanted: Call, *, backward: bool) -> float | None:
    """Return the FLOPs of a dense or square causal call; a mask's need a count that is not made."""
    shape = wanted.shape
    causal = wanted.keywords.get("causal", False)
    if wanted.has_mods or (causal and shape.seqlen_q != shape.seqlen_kv):
        return None
    pairs = shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_kv
    forward = 2.0 * pairs * (shape.head_dim + shape.head_dim_v) / (2 if causal else 1)
    return forward * (3.5 if backward else 1.0)


def _table(timings: dict[str, Timing], num_flops: float | None) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    headings = ["ms", "fovea is", *(["TFLOP/s"] if num_flops else []), "rounds"]
    for heading in headings:
        table.add_column(heading, justify="right")
    own = timings["fovea"].median_s
    for name, timing in timings.items():
        row = [name, f"{timing.median_s * 1e3:.3f}"]
        row.append("" if name == "fovea" else f"{ratio_text(timing.median_s / own)} as fast")
        row += [f"{num_flops / timing.median_s / 1e12:.3g}"] if num_flops else []
        table.add_row(*row, str(timing.num_rounds))
    return table
