"""atom, red, and vector and bulk-free reductions on global and shared memory.

Lives here: read-modify-write by lanes, in lane order. Not here: cp.reduce.async.bulk. Invariant:
every lane's operation is whole; lanes of one warp with the same address act one after the other.
Source: PTX ISA 9.7.13.9-10 (atom, red).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fovea.emulator.isa import bits as fp
from fovea.emulator.isa import instruction
from fovea.emulator.isa.instruction import Action, Array, Decoded, Instruction
from fovea.emulator.isa.load_store import load_lanes, state_space, store_lanes
from fovea.emulator.memory_order import SCOPES, Order
from fovea.emulator.ptx import syntax
from fovea.emulator.ptx.types import LANES, numpy_dtype, size_bytes

Combine = Callable[[Array, Array], Array]


def _wrap_increment(old: Array, limit: Array) -> Array:
    one = np.ones(1, old.dtype)
    return np.where(old >= limit, one - one, old + one)


def _wrap_decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - np.ones(1, old.dtype))


def _add_f32(old: Array, new: Array) -> Array:
    return fp.canonical_f32(old + new)


_INTEGER: dict[str, Combine] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": _wrap_increment,
    "dec": _wrap_decrement,
    "exch": lambda old, new: new,
}


def _half(kind: str, name: str) -> Combine:
    """Return an operation on raw 16-bit values, each rounded once."""
    widen, narrow = fp.half_to_f32[kind], fp.f32_to_half[kind]
    operation = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]
    return lambda old, new: narrow(
        operation(widen(old).astype(np.float64), widen(new)).astype(np.float32)
    )


def combine(name: str, ptx_type: str) -> tuple[Combine, Any]:
    """Return (operation, numpy dtype of its elements) of an atomic."""
    if ptx_type.removesuffix("x2") in ("f16", "bf16"):
        return _half(ptx_type.removesuffix("x2"), name), np.dtype(np.uint16)
    if ptx_type == "f32":
        return (_add_f32 if name == "add" else _INTEGER[name]), np.dtype(np.float32)
    return _INTEGER[name], numpy_dtype(ptx_type)


_QUALIFIERS = dict(  # noqa: C408 - keywords of the decorator
    sem="relaxed acquire release acq_rel",
    scope="cta cluster gpu sys",
    space="global shared shared::cta shared::cluster",
)


def _update(
    ins: Instruction,
    address: str,
    ptx_type: str,
    values: Callable[[Any], list[Array]],
    operation: Callable[..., Array],
    dtype: Any,
    write: Any,
    *,
    is_conditional: bool = False,
) -> Action:
    """Return the action: lanes with distinct addresses at once, others one by one.

    A conditional one that changes nothing writes nothing, so that nobody waits in vain for a loop
    around it to get anywhere.
    """
    item, space = size_bytes(ptx_type), state_space(ins, address)
    parts = len(ins.items("b")) if isinstance(ins.operands["b"], syntax.Vector) else 1
    sem, scope = ins["sem"], SCOPES[ins["scope"] or "gpu"]
    takes, hands = sem in ("acquire", "acq_rel"), sem in ("release", "acq_rel")
    order = Order(scope, is_acquire=takes, is_release=hands, is_update=True)
    load = load_lanes(ins, address, space, item, parts, order)
    store = store_lanes(ins, address, space, item, order)
    read_address = ins.address(address)

    def computed(old: Array, operands: list[Array]) -> Array:
        new = [
            operation(old[n].view(dtype), *(v[n].view(dtype) for v in operands)).view(old.dtype)
            for n in range(parts)
        ]
        return np.array(new)

    def changed(old: Array, new: Array, mask: Array) -> bool:
        return bool((old != new)[:, mask].any())

    def apply(w: Any, mask: Array, operands: list[Array]) -> Array:
        old = load(w, mask)
        new = computed(old, operands)
        if not is_conditional or changed(old, new, mask):
            store(w, mask, new)
        return old

    def all_at_once(w: Any, mask: Array, operands: list[Array]) -> Array | None:
        """Return the old values if no lane's update can meet another's, else None."""
        addresses = read_address(w)[mask]
        if len(set(addresses.tolist())) == len(addresses):
            return apply(w, mask, operands)
        if not is_conditional:
            return None
        old = load(w, mask)
        return old if not changed(old, computed(old, operands), mask) else None

    def run(w: Any, mask: Array) -> None:
        operands = [np.array(v) for v in values(w)]
        old = all_at_once(w, mask, operands)
        if old is None:
            old = np.zeros((parts, LANES), f"u{item}")
            for lane in np.flatnonzero(mask).tolist():
                alone = np.arange(LANES) == lane
                old[:, lane] = apply(w, alone, operands)[:, lane]
        if write is not None:
            write(w, mask, list(old) if parts > 1 else old[0])

    return run


def _values(ins: Instruction, ptx_type: str, names: str) -> Callable[[Any], list[Array]]:
    """Return a reader of the operands: for each, an array (elements, 32)."""
    raw = f"u{8 * size_bytes(ptx_type)}"
    readers = [
        [
            ins.read_operand(part, raw if isinstance(part, syntax.Register) else ptx_type)
            for part in ins.items(name)
        ]
        for name in names.split()
    ]
    unsigned = numpy_dtype(raw)
    return lambda w: [np.array([read(w).view(unsigned) for read in group]) for group in readers]


def _make(ins: Instruction, name: str, ptx_type: str, has_result: bool) -> Any:
    operation, dtype = combine(name, ptx_type)
    write = None
    if has_result and not isinstance(ins.operands["d"], syntax.Sink):
        raw = f"u{8 * size_bytes(ptx_type)}"
        is_vector = isinstance(ins.operands["b"], syntax.Vector)
        write = ins.write_vector("d", raw) if is_vector else ins.write("d", raw)
    values = _values(ins, ptx_type, "b")
    return _update(ins, "a", ptx_type, values, operation, dtype, write)


@instruction("atom{.sem}{.scope}{.space}.op{.L2::cache_hint}.type d, [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory", op="add",
             type="u32 s32 u64 f32 f64", **_QUALIFIERS)  # fmt: skip
@instruction("atom{.sem}{.scope}{.space}.op{.L2::cache_hint}.type d, [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory", op="min max",
             type="u32 s32 u64 s64", **_QUALIFIERS)  # fmt: skip
@instruction("atom{.sem}{.scope}{.space}.op{.L2::cache_hint}.type d, [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory",
             op="and or xor exch", type="b32 b64", **_QUALIFIERS)  # fmt: skip
@instruction("atom{.sem}{.scope}{.space}.op{.L2::cache_hint}.type d, [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory", op="inc dec",
             type="u32", **_QUALIFIERS)  # fmt: skip
def atom(ins: Instruction) -> Decoded:
    """d = [a]; [a] = d op b."""
    return _make(ins, ins["op"], ins["type"], has_result=True)


@instruction("atom{.sem}{.scope}{.space}.op.noftz{.L2::cache_hint}.type d, [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory", op="add",
             type="f16 bf16 f16x2 bf16x2", **_QUALIFIERS)  # fmt: skip
@instruction("atom{.sem}{.scope}{.global}.op{.noftz}{.L2::cache_hint}.vec.type"
             " d, [a], b{, cache-policy}", source="PTX ISA 9.7.13.9", targets="sm_90+",
             evidence="manual-only",
             kind="memory", op="add min max", vec="v2 v4 v8",
             type="f32 f16 bf16 f16x2 bf16x2", sem="relaxed acquire release acq_rel",
             scope="cta cluster gpu sys")  # fmt: skip
def atom_float(ins: Instruction) -> Decoded:
    """d = [a]; [a] = d op b for halves, pairs and vectors."""
    return _make(ins, ins["op"], ins["type"], has_result=True)


@instruction("atom{.sem}{.scope}{.space}.cas{.L2::cache_hint}.type d, [a], b, c{, cache-policy}",
             source="PTX ISA 9.7.13.9", evidence="manual-only", kind="memory",
             type="b16 b32 b64", **_QUALIFIERS)  # fmt: skip
def atom_cas(ins: Instruction) -> Decoded:
    """d = [a]; [a] = (d == b) ? c : d."""
    t = ins["type"]
    values = _values(ins, t, "b c")
    write = None if isinstance(ins.operands["d"], syntax.Sink) else ins.write("d", t)

    def operation(old: Array, expected: Array, new: Array) -> Array:
        return np.where(old == expected, new, old)

    return _update(ins, "a", t, values, operation, numpy_dtype(t), write, is_conditional=True)


@instruction("red{.sem}{.scope}{.space}.op{.L2::cache_hint}.type [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.10", evidence="manual-only", kind="memory", op="add",
             type="u32 s32 u64 f32 f64", **_QUALIFIERS)  # fmt: skip
@instruction("red{.sem}{.scope}{.space}.op{.L2::cache_hint}.type [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.10", evidence="manual-only", kind="memory", op="min max",
             type="u32 s32 u64 s64", **_QUALIFIERS)  # fmt: skip
@instruction("red{.sem}{.scope}{.space}.op{.L2::cache_hint}.type [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.10", evidence="manual-only", kind="memory", op="and or xor",
             type="b32 b64", **_QUALIFIERS)  # fmt: skip
@instruction("red{.sem}{.scope}{.space}.op{.L2::cache_hint}.type [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.10", evidence="manual-only", kind="memory", op="inc dec",
             type="u32", **_QUALIFIERS)  # fmt: skip
@instruction("red{.sem}{.scope}{.space}.op.noftz{.L2::cache_hint}.type [a], b{, cache-policy}",
             source="PTX ISA 9.7.13.10", evidence="manual-only", kind="memory", op="add",
             type="f16 bf16 f16x2 bf16x2", **_QUALIFIERS)  # fmt: skip
@instruction("red{.sem}{.scope}{.global}.op{.noftz}{.L2::cache_hint}.vec.type"
             " [a], b{, cache-policy}", source="PTX ISA 9.7.13.10", targets="sm_90+",
             evidence="manual-only",
             kind="memory", op="add min max", vec="v2 v4 v8", type="f32 f16 bf16 f16x2 bf16x2",
             sem="relaxed acquire release acq_rel", scope="cta cluster gpu sys")  # fmt: skip
def red(ins: Instruction) -> Decoded:
    """[a] = [a] op b."""
    return _make(ins, ins["op"], ins["type"], has_result=False)


__all__ = ["combine"]
