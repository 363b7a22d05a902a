"""fovea behind torch's own attention: scaled_dot_product_attention and varlen_attn on CUDA tensors.

Lives here: torch's flash-attention operators in terms of fovea, and their registration. Not here:
what torch asks before it calls them (its eligibility test stays: fp16 or bf16, no dense mask, its
head dims). Invariant: an argument that fovea does not take raises; torch's operators stay
differentiable, compilable and exportable, since only their CUDA kernels are replaced.

    fovea.integrations.torch_sdpa.activate()      # until deactivate()
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from fovea import dispatch
from fovea.errors import UnsupportedError, invalid
from fovea.problem import (
    AttentionProblem,
    ForwardResult,
    GradientNeeds,
    Request,
    VarlenRequest,
    make_dense,
    make_varlen,
)

NAME = "fovea"
_NEEDS = GradientNeeds(q=True, k=True, v=True, sink=False, score_captures=())


def activate() -> None:
    """Let torch's flash-attention operators run fovea on CUDA tensors.

    Raises:
        UnsupportedError: this torch has no registry of implementations.
    """
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl "
            "(allowed: torch 2.11 or newer); upgrade torch, or call fovea.attention directly."
        )
    torch_attention.register_flash_attention_impl(NAME, register_fn=_register)
    torch_attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Put torch's own kernels back.

    Raises:
        ValueError: another implementation is active.
    """
    active = torch_attention.current_flash_attention_impl()
    if active != NAME:
        raise ValueError(
            invalid("active implementation", repr(active), repr(NAME), "call activate() first")
        )
    torch_attention.restore_flash_attention_impl()


class _Handle:
    """Owns the replaced kernels; torch calls `remove` to restore its own."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def remove(self) -> None:
        self.library = None


def _register() -> _Handle:
    library: Any = torch.library.Library("aten", "IMPL", "CUDA")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CUDA")
    return _Handle(library)


def flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Run aten::_flash_attention_forward.

    Args:
        query, key, value: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
        *arguments: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask.
        **options: scale, window_size_left, window_size_right, seqused_k, alibi_slopes,
            block_table, num_splits.
    """
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, wants_debug_mask = arguments
    _check_absent(dropout_p=dropout_p, return_debug_mask=wants_debug_mask)
    _check_absent(alibi_slopes=options.get("alibi_slopes"))
    request = _request(is_causal, options)
    if cum_seq_q is None:
        _check_absent(seqused_k=options.get("seqused_k"), block_table=options.get("block_table"))
        problem = make_dense(query, key, value, request)
    else:
        table = options.get("block_table")
        where = VarlenRequest(
            cum_seq_q,
            cum_seq_k if table is None else None,
            max_q,
            max_k,
            None,
            options.get("seqused_k"),
            table,
        )
        problem = make_varlen(query, key, value, where, request)
    result = _run(problem)
    return (result.out, result.lse, *_no_dropout_state(query))


def flash_attention_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Run aten::_flash_attention_forward_no_dropout_inplace: as the forward, written to `out`."""
    result, lse, *_ = flash_attention_forward(*arguments, **options)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run aten::_flash_attention_backward.

    Args:
        grad_out, query, key, value: as the forward lays them out.
        *arguments: out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            rng_state, unused.
        **options: scale, window_size_left, window_size_right.
    """
    out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *_ = arguments
    _check_absent(dropout_p=dropout_p)
    request = _request(is_causal, options)
    if cum_seq_q is None or cum_seq_q.numel() == 0:
        problem = make_dense(query, key, value, request)
    else:
        where = VarlenRequest(cum_seq_q, cum_seq_k, max_q, max_k)
        problem = make_varlen(query, key, value, where, request)
    return _differentiate(problem, out, lse, grad_out)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Run aten::_scaled_dot_product_flash_attention on (batch, heads, seqlen, head_dim) tensors.

    Torch calls it with a causal mask for equal lengths alone, so the alignment does not matter.
    """
    _check_absent(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    result = _run(_sdpa_problem(query, key, value, is_causal, scale))
    lengths = (query.shape[2], key.shape[2])
    state = _no_dropout_state(query)
    return (result.out.transpose(1, 2), result.lse, None, None, *lengths, *state)


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run aten::_scaled_dot_product_flash_attention_backward.

    Args:
        grad_out, query, key, value: (batch, heads, seqlen, head_dim).
        *arguments: out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            philox_seed, philox_offset.
        **options: scale.
    """
    out, lse, _, _, _, _, dropout_p, is_causal, *_ = arguments
    _check_absent(dropout_p=dropout_p)
    problem = _sdpa_problem(query, key, value, is_causal, options.get("scale"))
    grads = _differentiate(problem, out.transpose(1, 2), lse, grad_out.transpose(1, 2))
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


KERNELS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_into,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}


def _sdpa_problem(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> AttentionProblem:
    request = Request(causal="top_left" if is_causal else False, scale=scale)
    return make_dense(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), request)


def _request(is_causal: bool, options: dict[str, Any]) -> Request:
    window = tuple(
        None if extent is None or extent < 0 else extent
        for extent in (options.get("window_size_left"), options.get("window_size_right"))
    )
    return Request(causal=is_causal, window=window, scale=options.get("scale"))


def _run(problem: AttentionProblem) -> ForwardResult:
    return dispatch.forward(problem, dispatch.choose(problem, None))


def _differentiate(
    problem: AttentionProblem, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads = dispatch.backward(
        problem,
        dispatch.choose(problem, None),
        out=out,
        lse=lse,
        dout=grad_out,
        dlse=None,
        needs=_NEEDS,
    )
    assert grads.dq is not None
    assert grads.dk is not None
    assert grads.dv is not None
    return grads.dq, grads.dk, grads.dv


def _no_dropout_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rng_state, unused and debug_mask of a call without dropout."""
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return rng_state, unused, query.new_empty(0)


def _check_absent(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            got = "a tensor" if isinstance(value, Tensor) else value
            raise UnsupportedError(
                f"{name}={got} in torch's attention is not supported by fovea (allowed: none); "
                "select torch's own kernels with torch.nn.attention.sdpa_kernel, or call "
                "fovea.integrations.torch_sdpa.deactivate()."
            )
