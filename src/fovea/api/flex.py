"""fovea.flex_attention: torch's signature, layout and checks over fovea's backends.

Lives here: what differs from `fovea.attention`: (batch, heads, seqlen, head_dim), enable_gqa,
shared batches, kernel_options, torch's AuxRequest and AuxOutput. Invariant: a call that torch
accepts means the same here, except that block lists are always honoured.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from fovea.api.attention import ScoreMod, autocast
from fovea.errors import UnsupportedError, invalid
from fovea.ops import Passed, attend, attend_again
from fovea.problem import AttentionProblem, Request, make_dense

# Names that torch's own kernels are tuned by: they change no result, and fovea has its own plan.
_TUNING = frozenset(
    {
        "num_warps",
        "num_stages",
        "BLOCK_M",
        "BLOCK_N",
        "BLOCK_M1",
        "BLOCK_N1",
        "BLOCK_M2",
        "BLOCK_N2",
        "PRESCALE_QK",
        "ROWS_GUARANTEED_SAFE",
        "BLOCKS_ARE_CONTIGUOUS",
        "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION",
        "USE_TMA",
        "BACKEND",
        "OUTPUT_LOGSUMEXP",
        "OUTPUT_MAX",
        "kpack",
        "matrix_instr_nonkdim",
        "waves_per_eu",
    }
)
_OWN = ("backend", "deterministic")


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Return what torch.nn.attention.flex_attention.flex_attention returns for these arguments.

    Args:
        query, key, value: the inputs.
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        block_mask: from torch's or fovea's create_block_mask.
        scale: default 1/sqrt(head_dim).
        enable_gqa: allow fewer heads in key and value than in query.
        return_lse: also return the log-sum-exp; `return_aux` is its successor.
        kernel_options: `backend` and `deterministic` as in `fovea.attention`; torch's tuning keys
            are accepted and change nothing (`fovea.explain` lists them).
        return_aux: torch's AuxRequest; the result is then (out, AuxOutput).

    Shapes:
        query: (batch, heads_q, seqlen_q, head_dim); key: (batch, heads_kv, seqlen_kv, head_dim);
        value: (batch, heads_kv, seqlen_kv, head_dim_v); out: (batch, heads_q, seqlen_q,
        head_dim_v) in the stride order of query; lse: (batch, heads_q, seqlen_q). key and value
        may have batch 1 with a block_mask of the query's batch.

    Raises:
        TypeError, ValueError: wrong input.
        UnsupportedError: right input that the named backend lacks.
    """
    if return_lse and return_aux is not None:
        raise ValueError(
            invalid(
                "return_lse",
                True,
                "False with return_aux",
                "ask with return_aux=AuxRequest(lse=True)",
            )
        )
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        got = f"{type(return_aux).__module__}.{type(return_aux).__name__}"
        allowed = "None or torch.nn.attention.flex_attention.AuxRequest"
        raise TypeError(
            invalid("return_aux", got, allowed, "fovea.AuxRequest goes to fovea.attention")
        )
    own, _ = split_options(kernel_options)
    options = (
        *(False, None, score_mod, None, block_mask, None, None, scale, own["deterministic"]),
        return_lse or (return_aux is not None and bool(return_aux.lse)),
        return_aux is not None and bool(return_aux.max_scores),
    )
    passed = None
    if not torch.compiler.is_compiling():
        passed = _passed(query, key, value, options, own["backend"], enable_gqa=enable_gqa)
    result = None if passed is None else attend_again(passed)
    if result is None:
        request = Request(*options)
        problem = flex_problem(query, key, value, request, enable_gqa=enable_gqa)
        result = attend(problem, own["backend"], passed)
    out, lse, max_score = result
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_score)
    return (out, lse) if return_lse else out


def _passed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: tuple[Any, ...],
    backend: str | None,
    *,
    enable_gqa: bool,
) -> Passed | None:
    """Return the call as `fovea.attention` takes it; None where `flex_problem` has to look at it.

    Where it returns something, the checks of `flex_problem` pass and it expands nothing.
    """
    try:
        if not query.dim() == key.dim() == value.dim() == 4:
            return None
        batch, heads, *_ = query.shape
        if key.shape[0] != batch or (key.shape[1] != heads and not enable_gqa):
            return None
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        return None
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), options, backend


def flex_problem(
    query: Tensor, key: Tensor, value: Tensor, request: Request, *, enable_gqa: bool
) -> AttentionProblem:
    """Return the problem of a call in torch's layout, after torch's own checks."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(invalid(name, type(tensor).__name__, "a torch.Tensor", "pass a tensor"))
        if tensor.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor, which flex_attention does not take (allowed: dense "
                "tensors); use fovea.attention, which takes jagged ones, or attention_varlen."
            )
        if tensor.dim() != 4:
            raise ValueError(
                invalid(
                    f"{name}.shape",
                    tuple(tensor.shape),
                    "(batch, heads, seqlen, head_dim)",
                    "add the missing axes",
                )
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            invalid(
                "heads of query and key",
                (query.shape[1], key.shape[1]),
                "equal unless enable_gqa=True",
                "pass enable_gqa=True",
            )
        )
    key, value = _expand_batch(query, key, value, request)
    query, key, value = autocast(query, key, value)
    return make_dense(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), request)


def _expand_batch(
    query: Tensor, key: Tensor, value: Tensor, request: Request
) -> tuple[Tensor, Tensor]:
    """Expand keys and values of batch 1; torch allows it where a block mask has the batch."""
    batch = query.shape[0]
    if key.shape[0] == batch or key.shape[0] != 1:
        return key, value
    block_mask = cast(Any, request.block_mask)
    if block_mask is None or block_mask.kv_num_blocks.shape[0] != batch:
        raise ValueError(
            invalid(
                "batch of key",
                1,
                f"{batch}, the batch of query, or 1 with a block_mask of batch {batch}",
                "expand key and value",
            )
        )
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def split_options(kernel_options: dict[str, Any] | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (fovea's own options, names that are accepted and ignored).

    Raises:
        TypeError: no dict.
        ValueError: a name that neither fovea nor torch knows.
    """
    if kernel_options is not None and not isinstance(kernel_options, Mapping):  # pyright: ignore
        got = type(kernel_options).__name__
        raise TypeError(
            invalid("kernel_options", got, "None or a dict", "pass {'backend': ...}, say")
        )
    own: dict[str, Any] = {"backend": None, "deterministic": None}
    ignored: list[str] = []
    for name, option in (kernel_options or {}).items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if name in _OWN:
            own[name] = option
        elif plain in _TUNING:
            ignored.append(name)
        else:
            raise ValueError(
                invalid(
                    "kernel_options key",
                    repr(name),
                    f"{', '.join(_OWN)}, or a tuning key of torch ({', '.join(sorted(_TUNING))})",
                    "remove it or correct its spelling",
                )
            )
    return own, tuple(ignored)
