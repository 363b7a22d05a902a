"""Building of an `AttentionProblem` from what the user passed.

Lives here: the order of checks for dense and for packed calls. Not here: the checks themselves
(`checks.py`), tensor contents (`contents.py`). Invariant: each fact is checked once, here; the
layers below assert nothing about it again.
"""

import operator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fovea.errors import UnsupportedError, invalid
from fovea.mods.derivative import receivers
from fovea.problem import checks
from fovea.problem.gathers import check_gathers
from fovea.problem.value import AttentionProblem, Varlen


class Request(NamedTuple):
    """The options that every attention call takes, as the user wrote them."""

    causal: object = False
    window: object = None
    score_mod: object = None
    mask_mod: object = None
    block_mask: object = None
    softcap: object = None
    sink: Tensor | None = None
    scale: object = None
    deterministic: bool | None = None
    wants_lse: bool = False
    wants_max_score: bool = False


class VarlenRequest(NamedTuple):
    """Where the sequences of a packed call lie, as the user wrote it."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    seqused_q: Tensor | None = None
    seqused_kv: Tensor | None = None
    page_table: Tensor | None = None


def make_dense(q: Tensor, k: Tensor, v: Tensor, request: Request) -> AttentionProblem:
    """Return the problem of one call on (batch, seqlen, heads, head_dim) tensors.

    Raises:
        TypeError, ValueError: wrong input.
        UnsupportedError: right input that no backend takes.
    """
    checks.check_tensors(q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        remedy = "add the missing axes; packed sequences go to fovea.attention_varlen"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            checks.check_rank(name, tensor, "batch, seqlen, heads, head_dim", remedy)
    batch = shape_q[0]
    if shape_k[0] != batch or shape_v[0] != batch:
        raise ValueError(
            invalid(
                "batch of k and v",
                (shape_k[0], shape_v[0]),
                f"{batch}, the batch of q",
                "expand a shared batch with k.expand(batch, -1, -1, -1); it costs no memory",
            )
        )
    if shape_k[1] != shape_v[1]:
        raise ValueError(
            invalid("seqlen of v", shape_v[1], f"{shape_k[1]}, the seqlen of k", "match them")
        )
    checks.check_heads(shape_q, shape_k, shape_v)
    return _finish(q, k, v, request, None, batch, (shape_q[1], shape_k[1]))


def make_varlen(
    q: Tensor, k: Tensor, v: Tensor, where: VarlenRequest, request: Request
) -> AttentionProblem:
    """Return the problem of one call on packed (total, heads, head_dim) tensors.

    Raises:
        TypeError, ValueError: wrong input.
        UnsupportedError: gradients through a paged cache.
    """
    checks.check_tensors(q, k, v)
    checks.check_rank("q", q, "total_q, heads_q, head_dim", "flatten batch and seqlen")
    _check_index("cu_seqlens_q", where.cu_seqlens_q, q, "batch + 1")
    batch = where.cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError(
            invalid(
                "cu_seqlens_q.shape", (0,), "(batch + 1,)", "an empty batch has the one entry 0"
            )
        )
    lengths = tuple(
        _normal_length(name, length)
        for name, length in (
            ("max_seqlen_q", where.max_seqlen_q),
            ("max_seqlen_kv", where.max_seqlen_kv),
        )
    )
    for name, used in (("seqused_q", where.seqused_q), ("seqused_kv", where.seqused_kv)):
        if used is not None:
            _check_index(name, used, q, "batch")
            _check_entries(name, used, batch)
    if where.page_table is None:
        _check_packed_kv(k, v, where, q, batch)
    else:
        _check_paged_kv(q, k, v, where, batch)
    checks.check_heads(q.shape, k.shape, v.shape)
    varlen = Varlen(
        cu_seqlens_q=where.cu_seqlens_q,
        cu_seqlens_kv=where.cu_seqlens_kv,
        max_seqlen_q=lengths[0],
        max_seqlen_kv=lengths[1],
        seqused_q=where.seqused_q,
        seqused_kv=where.seqused_kv,
        page_table=where.page_table,
    )
    problem = _finish(q, k, v, request, varlen, batch, (lengths[0], lengths[1]))
    if where.page_table is not None:
        return _without_gradient(problem)
    return problem


def _finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    request: Request,
    varlen: Varlen | None,
    batch: int,
    lengths: tuple[int, int],
) -> AttentionProblem:
    """Check what dense and packed calls share, and build the problem."""
    scale, softcap, sink = request.scale, request.softcap, request.sink
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        scale = checks.normal_number("scale", scale, q, is_positive=False)
    if softcap is not None:
        softcap = checks.normal_number("softcap", softcap, q, is_positive=True)
    if sink is not None:
        checks.check_sink(sink, q)
    block_lists = block_mask_mod = None
    if request.block_mask is not None:
        block_lists, block_mask_mod = checks.read_block_mask(
            request.block_mask, q, batch=batch, lengths=lengths
        )
    deterministic, warns = _normal_deterministic(request.deterministic)
    score_mod, mask_mod = request.score_mod, request.mask_mod
    problem = AttentionProblem(
        q=q,
        k=k,
        v=v,
        sink=sink,
        causal=checks.normal_causal(request.causal),
        window=checks.normal_window(request.window),
        softcap=softcap,
        scale=scale,
        has_default_scale=request.scale is None,
        score_mod=None if score_mod is None else checks.trace_score(score_mod, q),
        mask_mod=None if mask_mod is None else checks.trace_mask("mask_mod", mask_mod, q),
        block_lists=block_lists,
        block_mask_mod=block_mask_mod,
        varlen=varlen,
        deterministic=deterministic,
        deterministic_warns=warns,
        wants_lse=request.wants_lse,
        wants_max_score=request.wants_max_score,
    )
    if score_mod is not None or mask_mod is not None or block_mask_mod is not None:
        check_gathers(problem)
    return problem


def _normal_deterministic(deterministic: object) -> tuple[bool, bool]:
    """Return (wanted, whether a backend that cannot only warns)."""
    if deterministic is None:
        if not torch.are_deterministic_algorithms_enabled():
            return False, False
        return True, _is_warn_only()
    if not isinstance(deterministic, bool):
        raise TypeError(
            invalid(
                "deterministic",
                repr(deterministic),
                "True, False, or None for torch.are_deterministic_algorithms_enabled()",
                "pass one of them",
            )
        )
    return deterministic, False


def _is_warn_only() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()


# Dynamo cannot trace the function inside, but guards on the setting: so it may run it once.
_is_warn_only._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _check_packed_kv(k: Tensor, v: Tensor, where: VarlenRequest, q: Tensor, batch: int) -> None:
    if where.cu_seqlens_kv is None:
        raise ValueError(
            invalid(
                "cu_seqlens_kv",
                None,
                "a tensor (batch + 1,), or None with a page_table",
                "pass cu_seqlens_q again where keys and queries have the same lengths",
            )
        )
    for name, tensor in (("k", k), ("v", v)):
        checks.check_rank(
            name,
            tensor,
            "total_kv, heads_kv, head_dim",
            "flatten batch and seqlen; a paged cache needs page_table and seqused_kv",
        )
    _check_index("cu_seqlens_kv", where.cu_seqlens_kv, q, "batch + 1")
    _check_entries("cu_seqlens_kv", where.cu_seqlens_kv, batch + 1)
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            invalid("total rows of v", v.shape[0], f"{k.shape[0]}, the rows of k", "match them")
        )


def _check_paged_kv(q: Tensor, k: Tensor, v: Tensor, where: VarlenRequest, batch: int) -> None:
    if where.cu_seqlens_kv is not None or where.seqused_kv is None:
        allowed = "cu_seqlens_kv=None and seqused_kv of shape (batch,) with a page_table"
        remedy = "pass the lengths of a paged cache as seqused_kv"
        if where.cu_seqlens_kv is not None:
            raise ValueError(invalid("cu_seqlens_kv", "given", allowed, remedy))
        raise ValueError(invalid("seqused_kv", None, allowed, remedy))
    table = cast(Tensor, where.page_table)  # or whatever else was passed, but None
    _check_index("page_table", table, q, "batch, max_pages")
    _check_entries("page_table", table, batch)
    for name, tensor in (("k", k), ("v", v)):
        remedy = "a paged cache has one (page_size, heads_kv, head_dim) slab a page"
        checks.check_rank(name, tensor, "pages, page_size, heads_kv, head_dim", remedy)
    if k.shape[:2] != v.shape[:2] or k.shape[1] < 1:
        raise ValueError(
            invalid(
                "(pages, page_size) of k and v",
                (tuple(k.shape[:2]), tuple(v.shape[:2])),
                "equal, page_size at least 1",
                "allocate both caches alike",
            )
        )


def _without_gradient(problem: AttentionProblem) -> AttentionProblem:
    """Return a paged problem, captures that receive no gradient detached.

    Raises:
        UnsupportedError: autograd would record the call.
    """
    if not torch.is_grad_enabled():
        return problem
    named = {"q": problem.q, "k": problem.k, "v": problem.v, "sink": problem.sink}
    asking = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
    mod = problem.score_mod
    learns = mod is not None and any(capture.requires_grad for capture in mod.captures)
    if mod is not None and learns and receivers(mod.graph.text()) != "":
        asking.append("a tensor captured by score_mod")
    if asking:
        raise UnsupportedError(
            f"page_table with gradients required by {', '.join(asking)} is not supported (allowed: "
            "no gradient through a paged cache); call it under torch.no_grad(), pass or capture "
            "tensor.detach(), or pack the keys and use cu_seqlens_kv."
        )
    if mod is None or not learns:
        return problem
    captures = tuple([capture.detach() for capture in mod.captures])
    return replace(problem, score_mod=replace(mod, captures=captures))


def _check_index(name: str, tensor: Tensor, q: Tensor, extent: str) -> None:
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        allowed = f"a torch.int32 tensor ({extent}{'' if ',' in extent else ','})"
        raise TypeError(invalid(name, repr(cast(Any, tensor)), allowed, "pass a tensor"))
    checks.check_layout(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(
            invalid(f"{name}.dtype", tensor.dtype, "torch.int32", f"pass {name}.to(torch.int32)")
        )
    checks.check_rank(name, tensor, extent, "reshape it")
    checks.check_device(name, tensor, q)


def _check_entries(name: str, tensor: Tensor, entries: int) -> None:
    if tensor.shape[0] != entries:
        raise ValueError(
            invalid(
                f"{name}.shape[0]",
                tensor.shape[0],
                f"{entries}, from cu_seqlens_q",
                "give every sequence one entry",
            )
        )


def _normal_length(name: str, length: object) -> int:
    if not isinstance(length, (int, torch.SymInt, Tensor)) and hasattr(length, "__index__"):
        with suppress(TypeError):  # of an array, which the check below refuses
            length = operator.index(cast(Any, length))  # such as NumPy's
    is_integer = isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool)
    if not is_integer:
        raise TypeError(
            invalid(
                name,
                repr(length) if not isinstance(length, Tensor) else "a tensor",
                "an integer of at least 0",
                "pass int(...) computed once; reading a tensor here would wait for the device",
            )
        )
    if cast(int, length) < 0:
        raise ValueError(invalid(name, length, "an integer of at least 0", "pass the longest"))
    return cast(int, length)
