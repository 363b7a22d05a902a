"""fovea.explain: what a call would run, and why.

Lives here: the answer as a value, and its text. Not here: the decisions themselves (`dispatch.py`,
`plan/select.py`), which this module only asks. Invariant: nothing is compiled, no attention is
launched, and of the tensors only lengths and a block mask's counts are read.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fovea import dispatch
from fovea.api.attention import autocast
from fovea.api.flex import flex_problem, split_options
from fovea.api.variants import Kernel, kernel_of
from fovea.arch import ARCHS, Arch, arch_named
from fovea.errors import UnsupportedError, invalid
from fovea.plan.kernel_calls import as_kernel_call
from fovea.plan.select import band_of
from fovea.problem import (
    AttentionProblem,
    Request,
    Varlen,
    VarlenRequest,
    make_dense,
    make_varlen,
)
from fovea.problem.keywords import REQUEST_NAMES, VARLEN_NAMES, check_keywords
from fovea.tiling.bounds import Band, visible_pairs

# What `explain` takes itself, beside the keywords of a call.
_OWN = ("backend", "return_aux", "kernel_options", "enable_gqa", "archs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a call would run; `print` it for people.

    Attributes:
        backend: the backend of the forward; None where the call would raise.
        reason: why that one, or the error.
        backward_backend, second_order_backend: what differentiates it, once and twice.
        kernels: for each architecture asked for, the kernel of this call or what is lacking.
        visible_pairs, total_pairs: (query, key) pairs inside causal, window and listed blocks, and
            all of them; mask_mods are not evaluated, so fewer may be visible. Counts of a block
            mask and lengths of packed sequences are fetched, which waits for a GPU; None where they
            cannot be (meta tensors). Of packed sequences block lists are not counted.
        flops: of the forward over `visible_pairs`; flops_dense over all.
        specialised: captured numbers that a mod branches on, so that each value is its own kernel.
        scalars: captured numbers that are arguments, so that a new value compiles nothing.
        ignored_options: kernel_options that change nothing here.
        copies: inputs whose layout a kernel cannot read in place.
        limits: least and largest kv_idx - q_idx of masks that kernels take as limits, with block
            lists that are not read then; None where no mask is such a band.
        key_ranges: architectures whose kernels take the block mask as a range of keys for each row,
            and read no lists: that of a mask by which no row sees several.
        mask_bits: architectures whose kernels take the partial blocks of a block mask as bits, and
            run no function of it.
    """

    call: str
    backend: str | None
    reason: str
    backward_backend: str | None
    second_order_backend: str
    kernels: tuple[Kernel, ...]
    visible_pairs: int | None
    total_pairs: int | None
    flops: int | None
    flops_dense: int | None
    specialised: tuple[str, ...]
    scalars: tuple[str, ...]
    ignored_options: tuple[str, ...]
    copies: tuple[str, ...]
    limits: tuple[int | None, int | None] | None
    key_ranges: tuple[str, ...]
    mask_bits: tuple[str, ...]

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that the chosen backend runs; None for the reference."""
        if self.backend is None or self.backend == "reference":
            return None
        return next((kernel for kernel in self.kernels if kernel.is_chosen), None)

    @property
    def sparsity(self) -> float | None:
        """Fraction of pairs that are skipped."""
        if self.visible_pairs is None or not self.total_pairs:
            return None
        return 1 - self.visible_pairs / self.total_pairs

    def __str__(self) -> str:
        return "\n".join(_wrapped(line) for line in _lines(self))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *packed: Any,
    backend: str | None = None,
    kernel_options: dict[str, Any] | None = None,
    enable_gqa: bool = False,
    return_aux: Any = None,
    archs: Sequence[str] | None = None,
    **keywords: Any,
) -> Explanation:
    """Return what `fovea.attention` would run for these arguments, and why.

    Args:
        q, k, v: as the call would take them; meta tensors do, since they are not read.
        packed: cu_seqlens_q, ... where they are passed by position, as to `fovea.attention_varlen`.
        backend: as the call takes it.
        kernel_options: explain `fovea.flex_attention` with these options instead: q, k and v are
            (batch, heads, seqlen, head_dim).
        enable_gqa: as `fovea.flex_attention` takes it.
        return_aux: as the call takes it.
        archs: architectures whose kernels are named, "sm90", "sm100" or "sm103"; None for all. That
            of the chosen backend is named in any case.
        **keywords: the other keywords of `fovea.attention`, and cu_seqlens_q, cu_seqlens_kv,
            max_seqlen_q, max_seqlen_kv, ... of `fovea.attention_varlen`.

    Raises:
        TypeError, ValueError: wrong input, as the call would raise. A call that would raise
            UnsupportedError is explained.
    """
    keywords = packed_keywords(packed, keywords)
    check_keywords(keywords, (*REQUEST_NAMES, *VARLEN_NAMES, *_OWN))
    shown = archs_named(ARCHS if archs is None else archs)
    request = _request_among(keywords, return_aux)
    ignored: tuple[str, ...] = ()
    if kernel_options is not None:
        options, ignored = split_options(kernel_options)
        backend = options["backend"] if backend is None else backend
        if options["deterministic"] is not None:
            request = request._replace(deterministic=options["deterministic"])
        problem = flex_problem(q, k, v, request, enable_gqa=enable_gqa)
    else:
        problem = _problem_of(q, k, v, request, keywords)
    return explain_problem(problem, dispatch.check_backend(backend), ignored, shown)


def call_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_aux: Any,
    keywords: dict[str, Any],
    own: tuple[str, ...] = (),
) -> AttentionProblem:
    """Return the validated call of `fovea.attention`, or of `attention_varlen` by its keywords.

    `own` are the keywords that the caller takes itself, for an error.

    Raises:
        TypeError, ValueError: wrong input, as the call would raise.
    """
    check_keywords(keywords, (*REQUEST_NAMES, *VARLEN_NAMES, *own))
    return _problem_of(q, k, v, _request_among(keywords, return_aux), keywords)


def _request_among(keywords: dict[str, Any], return_aux: Any) -> Request:
    named = {name: keywords[name] for name in REQUEST_NAMES if name in keywords}
    return request_of(named, return_aux)


def _problem_of(
    q: Tensor, k: Tensor, v: Tensor, request: Request, keywords: dict[str, Any]
) -> AttentionProblem:
    if not any(name in keywords for name in VARLEN_NAMES):
        return make_dense(*autocast(q, k, v), request)
    _check_varlen_names(keywords)
    named: dict[str, Any] = {"cu_seqlens_kv": None}
    named |= {name: keywords[name] for name in VARLEN_NAMES if name in keywords}
    return make_varlen(*autocast(q, k, v), VarlenRequest(**named), request)


def archs_named(names: Iterable[str]) -> tuple[Arch, ...]:
    """Return the architectures of these names.

    Raises:
        TypeError: a name alone.
        ValueError: no such architecture.
    """
    if isinstance(names, str):
        remedy = f"pass ({names!r},)"
        raise TypeError(invalid("archs", repr(names), "a sequence of names", remedy))
    return tuple(arch_named(name) for name in names)


def explain_problem(
    problem: AttentionProblem,
    backend: str | None,
    ignored: tuple[str, ...] = (),
    archs: tuple[Arch, ...] = tuple(ARCHS.values()),
) -> Explanation:
    """Return the explanation of a validated call."""
    choice = None
    try:
        choice = dispatch.decide(problem, backend)
        reason = choice.reason
    except UnsupportedError as error:
        reason = f"UnsupportedError: {error}"
    arch = None if choice is None else choice.arch
    shown = tuple(a for a in ARCHS.values() if a in archs or a == arch)
    band_call = as_kernel_call(problem)
    has_kept_masks = (
        band_call.mask_mod is problem.mask_mod and band_call.block_lists is problem.block_lists
    )
    visible, total = _pairs(band_call)
    per_pair = 2 * (problem.head_dim + problem.head_dim_v)
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    return Explanation(
        call=_call_text(problem),
        backend=None if choice is None else choice.backend,
        reason=reason,
        backward_backend=None if choice is None else choice.backward_backend,
        second_order_backend="reference",
        kernels=tuple(kernel_of(problem, a, is_chosen=a == arch) for a in shown),
        visible_pairs=visible,
        total_pairs=total,
        flops=None if visible is None else per_pair * visible,
        flops_dense=None if total is None else per_pair * total,
        specialised=tuple(note for mod in mods if mod is not None for note in mod.specialised),
        scalars=tuple(f"{s!r}" for mod in mods if mod is not None for s in mod.scalars),
        ignored_options=ignored,
        copies=_copies(problem),
        limits=None if has_kept_masks else band_call.limits,
        key_ranges=_archs_with(problem, "key_ranges", shown),
        mask_bits=_archs_with(problem, "mask_bits", shown),
    )


def _archs_with(problem: AttentionProblem, field: str, archs: tuple[Arch, ...]) -> tuple[str, ...]:
    """Return the architectures whose kernels get a call with a field that the call lacks."""
    calls = {arch.name: as_kernel_call(problem, arch) for arch in archs}
    return tuple(name for name, call in calls.items() if getattr(call, field) is not None)


def request_of(keywords: dict[str, Any], return_aux: Any) -> Request:
    """Return the request of a dense call's keywords, with either library's AuxRequest.

    Raises:
        TypeError: a keyword that no call has, or something else as return_aux.
    """
    check_keywords(keywords, REQUEST_NAMES)
    if return_aux is not None and not hasattr(return_aux, "lse"):
        got = type(return_aux).__name__
        raise TypeError(invalid("return_aux", got, "None or an AuxRequest", "pass one"))
    return Request(
        **keywords,
        wants_lse=bool(getattr(return_aux, "lse", False)),
        wants_max_score=bool(
            getattr(return_aux, "max_score", getattr(return_aux, "max_scores", False))
        ),
    )


def packed_keywords(positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with what `fovea.attention_varlen` takes by position.

    Raises:
        TypeError: there are more of these than it takes.
    """
    names = VARLEN_NAMES[:4]
    if len(positional) > len(names):
        got = f"{3 + len(positional)} arguments by position"
        allowed = f"q, k, v, {', '.join(names)}"
        raise TypeError(invalid("call", got, allowed, "pass the others by name"))
    return dict(zip(names, positional)) | keywords


def _check_varlen_names(keywords: dict[str, Any]) -> None:
    """Raise TypeError unless the keywords of a packed call are all there."""
    for name in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_kv"):
        if name not in keywords:
            given = ", ".join(n for n in VARLEN_NAMES if n in keywords)
            raise TypeError(
                invalid(name, "missing", "the value of the packed call", f"pass it with {given}")
            )


def _pairs(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """Return ((query, key) pairs left by band and lists, all pairs), over batch and heads."""
    if problem.varlen is not None:
        return _packed_pairs(problem, problem.varlen)
    rows = problem.batch * problem.heads_q
    total = problem.seqlen_q * problem.seqlen_kv
    band = band_of(problem)
    visible = rows * visible_pairs(band, seqlen_q=problem.seqlen_q, seqlen_kv=problem.seqlen_kv)
    lists = problem.block_lists
    if lists is not None and _is_readable(lists.kv_num_blocks):
        # Waits for a GPU. A call never does; who asks for an explanation has the time.
        count = int(lists.kv_num_blocks.sum())
        if lists.full_kv_num_blocks is not None:
            count += int(lists.full_kv_num_blocks.sum())
        copies = rows // max(lists.batch * lists.heads, 1)
        area = count * copies * lists.block_q * lists.block_kv
        visible = min(visible, area, rows * total)
    return visible, rows * total


def _packed_pairs(problem: AttentionProblem, varlen: Varlen) -> tuple[int | None, int | None]:
    """Return what `_pairs` does, summed over the sequences of a packed call."""
    if not _is_readable(varlen.cu_seqlens_q):
        return None, None
    lengths_q = _lengths(varlen.cu_seqlens_q, varlen.seqused_q)
    lengths_kv = _lengths(varlen.cu_seqlens_kv, varlen.seqused_kv)
    visible = total = 0
    for seqlen_q, seqlen_kv in zip(lengths_q, lengths_kv, strict=True):
        band = Band.of(problem.causal, problem.window, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        visible += visible_pairs(band, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        total += seqlen_q * seqlen_kv
    return problem.heads_q * visible, problem.heads_q * total


def _lengths(starts: Tensor | None, used: Tensor | None) -> list[int]:
    """Return the used lengths of packed or paged sequences."""
    segments = None if starts is None else _integers(starts.diff())
    if used is None:
        assert segments is not None
        return segments
    lengths = [max(length, 0) for length in _integers(used)]
    return lengths if segments is None else list(map(min, lengths, segments))


def _integers(tensor: Tensor) -> list[int]:
    return cast(Any, tensor).tolist()  # torch gives it no element type


def _is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor has contents that the host may fetch now."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _copies(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the inputs that a kernel reads from a copy."""
    found: list[str] = []
    for name, tensor in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        size = tensor.element_size()
        strides = tensor.stride()
        if tensor.numel() and strides[-1] != 1 and tensor.shape[-1] != 1:
            found.append(f"{name} (last stride {strides[-1]}, needed 1)")
        elif any(stride * size % 16 for stride in strides[:-1]):
            found.append(f"{name} (strides {strides} of {size} bytes are no multiples of 16 bytes)")
    return tuple(found)


def _call_text(problem: AttentionProblem) -> str:
    shape = " ".join(f"{name}{tuple(t.shape)}" for name, t in (("q", problem.q), ("k", problem.k)))
    names = [f"causal={problem.causal}"] if problem.causal else []
    if problem.window != (None, None):
        names.append(f"window={problem.window}")
    for name in ("softcap", "sink", "score_mod", "mask_mod", "block_lists", "varlen"):
        if getattr(problem, name) is not None:
            names.append(name)
    if problem.deterministic:
        names.append("deterministic")
    return f"{shape} head_dim_v={problem.head_dim_v} {problem.dtype} on {problem.device} " + (
        ", ".join(names) or "dense"
    )


def _lines(e: Explanation) -> list[str]:
    lines = [f"call          {e.call}"]
    lines.append(f"forward       {e.backend or 'none'}: {e.reason}")
    if e.backend is not None:
        how = e.backward_backend
        if e.backward_backend != e.backend:
            how = f"{how}, from the forward's lse, since {e.backend} has no backward yet"
        lines.append(f"backward      {how}; second order: {e.second_order_backend}")
    if e.total_pairs is not None and e.visible_pairs is not None and e.flops is not None:
        sparsity = e.sparsity or 0.0
        lines.append(
            f"work          {_big(e.flops)}FLOP in {_big(e.visible_pairs)}pairs; "
            f"{100 * sparsity:.1f} % of {_big(e.total_pairs)}pairs are skipped by causal, window "
            "and block lists"
        )
    for kernel in e.kernels:
        lines.extend(kernel.lines())
    if e.scalars:
        lines.append(f"scalars       {', '.join(e.scalars)}: run-time arguments of the kernel")
    if e.specialised:
        lines.append(f"specialised   {'; '.join(e.specialised)}: a new value is a new kernel")
    if e.ignored_options:
        lines.append(f"ignored       kernel_options {', '.join(e.ignored_options)}")
    if e.limits is not None:
        least, largest = (limit if limit is not None else "any" for limit in e.limits)
        lines.append(
            f"masks         limits in a kernel, {least} <= kv_idx - q_idx <= {largest}: no "
            "function runs, no block list is read"
        )
    if e.key_ranges:
        lines.append(
            f"block mask    a range of keys for each row in kernels for {', '.join(e.key_ranges)}: "
            "no function runs, no block list is read"
        )
    if e.mask_bits:
        lines.append(
            f"block mask    bits of its partial blocks in kernels for {', '.join(e.mask_bits)}: "
            "no function runs"
        )
    if e.copies:
        lines.append(f"copied first  {', '.join(e.copies)}")
    return lines


def _wrapped(line: str) -> str:
    """Return a line in pieces that fit a terminal, the later ones below its text."""
    return textwrap.fill(
        line, 100, subsequent_indent=" " * 16, break_long_words=False, break_on_hyphens=False
    )


def _big(number: float) -> str:
    """Return a number with a decimal prefix and a space before the unit."""
    for prefix in ("", "K", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"
