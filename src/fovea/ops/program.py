"""How an attention problem crosses the operator boundary: tensors, integers and one string.

Lives here: `pack`, its inverse `unpack`, and the canonical text of all static facts. Not here: the
operators (`library.py`). Invariant: a number that may change from call to call is an integer
argument or a 0-d tensor, never in the text, so that it costs no recompilation.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fovea.mods.graph import Graph
from fovea.mods.trace import TracedMod
from fovea.problem import AttentionProblem, Causal, Varlen
from fovea.problem.checks import check_number, is_unreadable
from fovea.tiling.block_lists import BlockLists

# Between the sections of the text; a graph's text has no line that consists of it.
_SEPARATOR = "\n%%\n"
_NUM_LIST_TENSORS = 8
_MOD_NAMES = ("score_mod", "mask_mod", "block_mask_mod")


class Packed(NamedTuple):
    """A problem as operator arguments.

    Attributes:
        captures: tensors captured by the score_mod, the only ones besides q, k, v and sink with
            gradients.
        constants: 0-d numbers, captures of mask_mods, block lists and sequence bounds, in this
            order.
        ints: window, integer scalars of mods, block sizes, lengths.
        program: canonical text of everything else.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captures: list[Tensor]
    constants: list[Tensor]
    ints: list[int]
    program: str


class Program(NamedTuple):
    """The static facts of a problem, as the text holds them."""

    backend: str | None
    causal: Causal | None
    has_window: tuple[bool, bool]
    has_default_scale: bool
    has_softcap: bool
    deterministic: bool
    deterministic_warns: bool
    wants_lse: bool
    wants_max_score: bool
    list_tensors: str  # one 0 or 1 for each of the eight tensors; empty without block lists
    varlen_tensors: str  # cu_seqlens_kv, seqused_q, seqused_kv, page_table; empty when dense
    mods: tuple[tuple[Graph, str] | None, ...]  # graph and source, in the order of _MOD_NAMES


def pack(problem: AttentionProblem, backend: str | None) -> Packed:
    """Return the operator arguments of a problem; torch.compile traces through this."""
    ints: list[int] = []
    constants: list[Tensor] = []
    window = _pack_window(problem, ints)
    if not problem.has_default_scale:
        constants.append(_number_tensor(problem.scale))
    if problem.softcap is not None:
        constants.append(_number_tensor(problem.softcap))
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    texts: list[str] = [_pack_mod(mod, ints, constants) for mod in mods]
    captures = list(problem.score_mod.captures) if problem.score_mod is not None else []
    for mod in mods[1:]:
        if mod is not None:
            constants.extend(mod.captures)
    facts = (
        f"backend={backend or '-'}"
        f" causal={problem.causal or '-'}"
        f" window={window}"
        f" scale={'default' if problem.has_default_scale else 'given'}"
        f" softcap={_bit(problem.softcap is not None)}"
        f" deterministic={_bit(problem.deterministic)}{_bit(problem.deterministic_warns)}"
        f" wants={_bit(problem.wants_lse)}{_bit(problem.wants_max_score)}"
        f" lists={_pack_lists(problem.block_lists, ints, constants)}"
        f" varlen={_pack_varlen(problem.varlen, ints, constants)}"
    )
    return Packed(
        q=problem.q,
        k=problem.k,
        v=problem.v,
        sink=problem.sink,
        captures=captures,
        constants=constants,
        ints=ints,
        program=_SEPARATOR.join([facts, *texts]),
    )


@lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """Return the static facts that `pack` wrote."""
    facts, *mods = text.split(_SEPARATOR)
    fact = dict(word.split("=", 1) for word in facts.split(" "))
    flags = {
        name: [bit == "1" for bit in fact[name]] for name in ("window", "deterministic", "wants")
    }
    causal = fact["causal"]
    assert causal in ("-", "bottom_right", "top_left")

    def read_mod(mod: str) -> tuple[Graph, str] | None:
        if not mod:
            return None
        source, graph = mod.split("\n", 1)
        return Graph.parse(graph), source

    return Program(
        backend=None if fact["backend"] == "-" else fact["backend"],
        causal=None if causal == "-" else causal,
        has_window=(flags["window"][0], flags["window"][1]),
        has_default_scale=fact["scale"] == "default",
        has_softcap=fact["softcap"] == "1",
        deterministic=flags["deterministic"][0],
        deterministic_warns=flags["deterministic"][1],
        wants_lse=flags["wants"][0],
        wants_max_score=flags["wants"][1],
        list_tensors=fact["lists"],
        varlen_tensors=fact["varlen"],
        mods=tuple(read_mod(mod) for mod in mods),
    )


def unpack(packed: Packed) -> AttentionProblem:
    """Return the problem that `pack` took apart; a 0-d CPU tensor becomes a number again.

    Raises:
        ValueError: such a number is out of its range; a symbolic one could not be checked earlier.
    """
    program = parse(packed.program)
    ints, constants = iter(packed.ints), iter(packed.constants)
    left = next(ints) if program.has_window[0] else None
    right = next(ints) if program.has_window[1] else None
    if program.has_default_scale:
        scale = packed.q.shape[-1] ** -0.5
    else:
        scale = _read_number("scale", next(constants), packed.q.dtype, is_positive=False)
    softcap = None
    if program.has_softcap:
        softcap = _read_number("softcap", next(constants), packed.q.dtype, is_positive=True)
    scalars = [_read_scalars(mod, ints, constants) for mod in program.mods]
    captures: list[Sequence[Tensor]] = [packed.captures]
    for mod in program.mods[1:]:
        captures.append([] if mod is None else [next(constants) for _ in mod[0].captures])
    score_mod, mask_mod, block_mask_mod = (
        _rebuild_mod(*parts) for parts in zip(program.mods, captures, scalars, strict=True)
    )
    # The order of the fields below is the order in which `pack` wrote integers and tensors.
    lists = _unpack_lists(program.list_tensors, ints, constants)
    varlen = _unpack_varlen(program.varlen_tensors, ints, constants)
    problem = AttentionProblem(
        q=packed.q,
        k=packed.k,
        v=packed.v,
        sink=packed.sink,
        causal=program.causal,
        window=(left, right),
        softcap=softcap,
        scale=scale,
        has_default_scale=program.has_default_scale,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask_mod=block_mask_mod,
        block_lists=lists,
        varlen=varlen,
        deterministic=program.deterministic,
        deterministic_warns=program.deterministic_warns,
        wants_lse=program.wants_lse,
        wants_max_score=program.wants_max_score,
    )
    return problem


def is_varlen(program: str) -> bool:
    """Return whether the text is of a packed call; cheap, for fakes."""
    return parse(program).varlen_tensors != ""


def _bit(flag: bool) -> str:
    return "1" if flag else "0"


def _pack_window(problem: AttentionProblem, ints: list[int]) -> str:
    for extent in problem.window:
        if extent is not None:
            ints.append(extent)
    return _bit(problem.window[0] is not None) + _bit(problem.window[1] is not None)


def _number_tensor(number: float | Tensor) -> Tensor:
    """Return a number as a 0-d tensor: as an argument of type float it would recompile by value."""
    if isinstance(number, Tensor):
        return number if number.device.type != "cpu" else number.to(torch.float64)
    if torch.compiler.is_compiling():
        # torch.tensor(number) would make a constant of it and compile one graph a value.
        return torch.zeros((), dtype=torch.float64) + number
    return torch.tensor(number, dtype=torch.float64)


def _read_number(
    name: str, number: Tensor, dtype: torch.dtype, *, is_positive: bool
) -> float | Tensor:
    if is_unreadable(number):
        return number
    value = float(number.item())
    check_number(name, value, dtype, is_positive=is_positive)
    return value


def _pack_mod(mod: TracedMod | None, ints: list[int], constants: list[Tensor]) -> str:
    if mod is None:
        return ""
    # By type, not by `graph.scalars`: under torch.compile a graph knows its text alone.
    for scalar in mod.scalars:
        if isinstance(scalar, int):
            ints.append(scalar)
        else:
            constants.append(_number_tensor(scalar))
    return f"{mod.source}\n{mod.graph.text()}"


def _read_scalars(
    mod: tuple[Graph, str] | None, ints: Iterator[int], constants: Iterator[Tensor]
) -> tuple[int | float, ...]:
    if mod is None:
        return ()
    return tuple(
        next(ints) if kind == "i64" else _read_scalar(next(constants)) for kind in mod[0].scalars
    )


def _read_scalar(number: Tensor) -> Any:
    """Return a number; a fake tensor, met while a second order is traced, stays a tensor."""
    return number if is_unreadable(number) else float(number.item())


def _rebuild_mod(
    mod: tuple[Graph, str] | None, captures: Sequence[Tensor], scalars: tuple[int | float, ...]
) -> TracedMod | None:
    if mod is None:
        return None
    return TracedMod(
        graph=mod[0], captures=tuple(captures), scalars=scalars, specialised=(), source=mod[1]
    )


def _pack_lists(lists: BlockLists | None, ints: list[int], constants: list[Tensor]) -> str:
    if lists is None:
        return ""
    ints.extend((lists.block_q, lists.block_kv, lists.seqlen_q, lists.seqlen_kv))
    present = ""
    for tensor in lists.tensors():
        present += _bit(tensor is not None)
        if tensor is not None:
            constants.append(tensor)
    return present


def _unpack_lists(
    present: str, ints: Iterator[int], constants: Iterator[Tensor]
) -> BlockLists | None:
    if not present:
        return None
    block_q, block_kv, seqlen_q, seqlen_kv = (next(ints) for _ in range(4))
    tensors = [next(constants) if bit == "1" else None for bit in present]
    kv_num_blocks, kv_indices = tensors[0], tensors[1]
    assert kv_num_blocks is not None
    assert kv_indices is not None
    return BlockLists(
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=tensors[2],
        full_kv_indices=tensors[3],
        q_num_blocks=tensors[4],
        q_indices=tensors[5],
        full_q_num_blocks=tensors[6],
        full_q_indices=tensors[7],
        block_q=block_q,
        block_kv=block_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        batch=kv_indices.shape[0],
        heads=kv_indices.shape[1],
    )


def _pack_varlen(varlen: Varlen | None, ints: list[int], constants: list[Tensor]) -> str:
    if varlen is None:
        return ""
    ints.extend((varlen.max_seqlen_q, varlen.max_seqlen_kv))
    constants.append(varlen.cu_seqlens_q)
    present = ""
    for tensor in (varlen.cu_seqlens_kv, varlen.seqused_q, varlen.seqused_kv, varlen.page_table):
        present += _bit(tensor is not None)
        if tensor is not None:
            constants.append(tensor)
    return present


def _unpack_varlen(present: str, ints: Iterator[int], constants: Iterator[Tensor]) -> Varlen | None:
    if not present:
        return None
    max_seqlen_q, max_seqlen_kv = next(ints), next(ints)
    cu_seqlens_q = next(constants)
    tensors = [next(constants) if bit == "1" else None for bit in present]
    return Varlen(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=tensors[0],
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        seqused_q=tensors[1],
        seqused_kv=tensors[2],
        page_table=tensors[3],
    )
