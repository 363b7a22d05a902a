"""Block cases of the copies through a tensor map: loads, stores and reductions of boxes.

Lives here: the cases and, as their source of truth, a plain reading of the manual: which element a
place of the box is, what lies out of bounds, where the swizzle puts it. Not here: the emulator's
own version of that. Invariant: shared memory is dumped byte for byte.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from block_copies import POLICY, combine, numbered, storage
from block_table import (
    CLUSTER_SYNC,
    INIT_BARRIERS,
    BlockCase,
    Tensor,
    Words,
    dump,
    expect,
    fill,
    kernel,
    wait,
    words,
)

LOAD = "PTX ISA 9.7.9.27.1.2, 5.5 (tensors)"
REDUCE = "PTX ISA 9.7.9.27.1.3"
BYTES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "bf16": 2, "f32": 4,
         "f64": 8, "tf32": 4, "f32.ftz": 4, "tf32.ftz": 4}  # fmt: skip
STORE_END = """
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""


def packed(sizes: tuple[int, ...], element: str, over: str, **more: Any) -> Tensor:
    """Return the map of a tensor without gaps."""
    strides = [sizes[0] * BYTES[element]]
    for size in sizes[1:-1]:
        strides.append(strides[-1] * size)
    return Tensor(
        over=over, element=element, sizes=sizes, strides=tuple(strides[: len(sizes) - 1]), **more
    )


def steps_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the element strides; that of dimension 0 is ignored (cuTensorMapEncodeTiled)."""
    return (1, *(tensor.element_strides or (1,) * len(tensor.sizes))[1:])


def swizzled(offset: int, width: int) -> int:
    """Return where byte `offset` of an aligned tile lies: chunk bits 4-6 XOR line bits 7-9."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return offset ^ ((offset >> 7 & mask) << 4)


def places(tensor: Tensor, at: tuple[int, ...]) -> Iterator[tuple[int, int | None]]:
    """Yield (byte in the shared tile, byte in the tensor or None) of every element of a box."""
    steps = steps_of(tensor)
    counts = [-(-b // s) for b, s in zip(tensor.box, steps)]
    size = BYTES[tensor.element]
    strides = (size, *tensor.strides)
    for number, index in enumerate(itertools.product(*map(range, reversed(counts)))):
        where = [a + i * s for a, i, s in zip(at, reversed(index), steps)]
        is_inside = all(0 <= w < n for w, n in zip(where, tensor.sizes))
        source = sum(w * s for w, s in zip(where, strides)) if is_inside else None
        yield swizzled(number * size, tensor.swizzle), source


def box_bytes(tensor: Tensor) -> int:
    """Return the size of a box in shared memory."""
    steps = steps_of(tensor)
    return int(np.prod([-(-b // s) for b, s in zip(tensor.box, steps)])) * BYTES[tensor.element]


def loaded(tensor: Tensor, at: tuple[int, ...], data: Words) -> Words:
    """Return the shared tile after a load."""
    raw, size = data.view(np.uint8), BYTES[tensor.element]
    tile = np.zeros(box_bytes(tensor), np.uint8)
    # the NaN of the fill mode, of every float type; the manual leaves its bits open: from silicon
    filling = np.frombuffer(b"\xf7\x7f" * (size // 2), np.uint8)
    for into, source in places(tensor, at):
        if source is not None:
            tile[into : into + size] = raw[source : source + size]
        elif tensor.fills_nan:
            tile[into : into + size] = filling
    return words(tile)


def stored(tensor: Tensor, at: tuple[int, ...], before: Words, tile: Words) -> Words:
    """Return the tensor after a store."""
    raw, out, size = tile.view(np.uint8), before.copy(), BYTES[tensor.element]
    for origin, into in places(tensor, at):
        if into is not None:
            out.view(np.uint8)[into : into + size] = raw[origin : origin + size]
    return out


def coordinates(at: tuple[int, ...]) -> str:
    """Return a vector of constants."""
    return "{" + ", ".join(map(str, at)) + "}"


def load_case(
    name: str, tensor: Tensor, at: tuple[int, ...], *, space: str = "shared::cluster",
    suffix: str = "", policy: bool = False, tile: str = ".tile",
) -> BlockCase:  # fmt: skip
    """One CTA loads a box and dumps it."""
    size, dim = box_bytes(tensor), len(tensor.sizes)
    data = numbered(int(np.prod(tensor.sizes)) * BYTES[tensor.element], seed=sum(map(ord, name)))
    form = f"cp.async.bulk.tensor.{dim}d.{space}.global{tile}.mbarrier::complete_tx::bytes{suffix}"
    tail = ", %w0" if policy else ""
    body = INIT_BARRIERS + POLICY * policy + expect(size)
    body += f"    @%first {form} [%smem], [%map, {coordinates(at)}], [%bar]{tail};\n"
    body += wait("loaded") + dump(size)
    return BlockCase(
        name=name, group="tensor", source=LOAD, ptx=kernel(body, has_tensor=True), tensor=tensor,
        inputs=data, expected=loaded(tensor, at, data),
    )  # fmt: skip


SIZES = (16, 5, 4, 3, 2)
BOX = (8, 4, 3, 2, 2)
# Corner -> size and box of dimension 0, where the box begins there, and in the other dimensions.
# It begins at a multiple of 16 bytes: silicon refuses others (error 715, illegal instruction).
CORNERS = {"inside": (16, 8, 8, 0), "before": (24, 16, -8, -1), "beyond": (24, 16, 16, 1)}


def cornered(dim: int, corner: str, over: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor and where its box begins: inside, or across the bounds of each dimension."""
    size, box, inner, start = CORNERS[corner]
    sizes, boxes = (size, *SIZES[1:dim]), (box, *BOX[1:dim])
    return packed(sizes, "u16", over, box=boxes), (inner, *[start] * (dim - 1))


def loads() -> Iterator[BlockCase]:
    """Boxes of every rank, inside and across the bounds; swizzles; element types; steps."""
    for dim in range(1, 6):
        for corner in CORNERS:
            yield load_case(f"load {dim}d {corner}", *cornered(dim, corner, "in"))
    for width in (32, 64, 128):
        tensor = packed((128, 24), "bf16", "in", box=(width // 2, 16), swizzle=width)
        yield load_case(f"load swizzle {width}", tensor, (width // 2, 3))
        yield load_case(f"load swizzle {width} beyond", tensor, (128 - width // 4, 15))
    for element, bytes_of in BYTES.items():
        tensor = packed((64 // bytes_of, 8), element, "in", box=(16 // bytes_of, 4))
        case = load_case(f"load {element}", tensor, (0, 2))
        if element.endswith(".ftz"):  # half of the inputs become subnormal
            tiny = case.inputs & np.where(np.arange(128) % 2, 0xFFFFFFFF, 0x807FFFFF)
            tiny = tiny.astype(np.uint32)
            # Silicon flushes nothing.
            case = replace(case, inputs=tiny, expected=loaded(tensor, (0, 2), tiny))
        if element.startswith("tf32"):  # the nearest number of 10 bits; data without ties
            rounded = (case.expected.astype(np.uint64) + 0x1000).astype(np.uint32) & 0xFFFFE000
            case = replace(case, source=f"{LOAD}; rounding inferred", expected=rounded)
        yield case
    for element in ("f16", "bf16", "f32"):
        inner = 32 // BYTES[element]
        tensor = packed((inner, 6), element, "in", box=(inner, 4), fills_nan=True)
        yield load_case(f"load {element} nan fill", tensor, (inner // 2, 4))
    tensor = packed((32, 16), "u16", "in", box=(16, 8), element_strides=(1, 3))
    yield load_case("load element strides", tensor, (8, 1))
    tensor = packed((32, 16), "u32", "in", box=(16, 8), element_strides=(2, 2))
    yield load_case("load inner element stride", tensor, (4, 3))
    tensor = packed((32, 16), "u16", "in", box=(16, 8))
    yield load_case("load shared cta", tensor, (8, 4), space="shared::cta")
    yield load_case("load without tile", tensor, (8, 4), tile="")
    yield load_case("load cache hint", tensor, (8, 4), suffix=".L2::cache_hint", policy=True)
    overlapping = Tensor(
        over="in", element="u32", sizes=(8, 6), strides=(16,), box=(8, 6)
    )  # rows of 32 bytes every 16
    case = load_case("load overlapping rows", overlapping, (0, 0))
    yield case


def cluster_loads() -> Iterator[BlockCase]:
    """Multicast to a pair, and a prefetch before a load."""
    tensor = packed((32, 8), "u16", "in", box=(32, 8))
    data, size = numbered(512, seed=9), box_bytes(tensor)
    form = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster"
    )
    body = INIT_BARRIERS + expect(size) + CLUSTER_SYNC + "    mov.u16 %mask, 3;\n"
    body += f"    @%lead {form} [%smem], [%map, {{0, 0}}], [%bar], %mask;\n"
    body += wait("loaded") + dump(size) + CLUSTER_SYNC
    yield BlockCase(
        name="load multicast", group="tensor", source=LOAD, tensor=tensor, inputs=data, cluster=2,
        ptx=kernel(body, has_tensor=True, cluster=2), expected=np.concatenate([data, data]),
    )  # fmt: skip
    body = "    prefetch.tensormap [%map];\n" + INIT_BARRIERS + expect(size)
    body += "    @%first cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%map, {0, 0}];\n"
    load = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    body += f"    @%first {load} [%smem], [%map, {{0, 0}}], [%bar];\n"
    body += wait("loaded") + dump(size)
    yield BlockCase(
        name="prefetch and load", group="tensor", source="PTX ISA 9.7.9.27.1.4", tensor=tensor,
        inputs=data, ptx=kernel(body, has_tensor=True), expected=data,
    )  # fmt: skip


def store_body(form: str, at: tuple[int, ...], size: int, *, policy: bool = False) -> str:
    """Fill shared memory and give it to a store."""
    tail = ", %w0" if policy else ""
    body = POLICY * policy + fill(size) + "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
    return body + f"    @%first {form} [%map, {coordinates(at)}], [%smem]{tail};\n" + STORE_END


def store_case(name: str, tensor: Tensor, at: tuple[int, ...], *, suffix: str = "") -> BlockCase:
    """One CTA stores a box."""
    dim, size = len(tensor.sizes), box_bytes(tensor)
    before = numbered(int(np.prod(tensor.sizes)) * BYTES[tensor.element], seed=11)
    tile = numbered(size, seed=12)
    form = f"cp.async.bulk.tensor.{dim}d.global.shared::cta.tile.bulk_group{suffix}"
    return BlockCase(
        name=name, group="tensor", source=LOAD, tensor=tensor, inputs=tile, before=before,
        ptx=kernel(store_body(form, at, size, policy=bool(suffix)), has_tensor=True),
        expected=stored(tensor, at, before, tile),
    )  # fmt: skip


def stores() -> Iterator[BlockCase]:
    """Boxes of every rank, whole and cut off by the bounds; swizzles."""
    for dim in range(1, 6):
        for corner in CORNERS:
            yield store_case(f"store {dim}d {corner}", *cornered(dim, corner, "out"))
    for width in (32, 64, 128):
        tensor = packed((128, 24), "bf16", "out", box=(width // 2, 16), swizzle=width)
        yield store_case(f"store swizzle {width}", tensor, (128 - width // 2, 15))
    tensor = packed((32, 16), "u16", "out", box=(16, 8))
    yield store_case("store cache hint", tensor, (8, 4), suffix=".L2::cache_hint")
    tensor = packed((32, 16), "u16", "out", box=(16, 8), element_strides=(1, 3))
    yield store_case("store element strides", tensor, (8, 1))


def reductions() -> Iterator[BlockCase]:
    """Boxes combined with what the tensor holds."""
    pairs = [("add", kind) for kind in ("u32", "s32", "u64", "f32", "f16", "bf16")]
    pairs += [(op, kind) for op in ("min", "max") for kind in ("u32", "s32", "f16", "bf16")]
    pairs += [(op, kind) for op in ("min", "max") for kind in ("u64", "s64")]
    pairs += [(op, "u32") for op in ("and", "or", "xor", "inc", "dec")]
    for op, kind in pairs:
        dtype: Any = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
                      "f16": np.float16}.get(kind, np.float32)  # fmt: skip
        rng = np.random.default_rng(21)
        is_float = kind in ("f16", "bf16", "f32")
        low, high = (-64, 64) if is_float else (0, 9 if op in ("inc", "dec") else 1 << 31)
        inner = 64 // BYTES[kind]
        old = rng.integers(low, high, (6, inner)).astype(dtype)
        new = rng.integers(low, high, (4, inner)).astype(dtype)
        result = old.copy()
        result[3:] = combine(op, old[3:], new[:3])
        tensor = packed((inner, 6), kind, "out", box=(inner, 4))
        form = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
        body = store_body(form, (0, 3), box_bytes(tensor))
        yield BlockCase(
            name=f"reduce {op} {kind}", group="tensor", source=REDUCE, tensor=tensor,
            ptx=kernel(body, has_tensor=True), inputs=storage(kind, new),
            before=storage(kind, old), expected=storage(kind, result),
        )  # fmt: skip
    for dim in (1, 3, 4, 5):
        tensor = packed(SIZES[:dim], "u32", "out", box=BOX[:dim])
        at = (4, *[1] * (dim - 1))
        before, tile = numbered(int(np.prod(SIZES[:dim])) * 4, 31), numbered(box_bytes(tensor), 32)
        form = f"cp.reduce.async.bulk.tensor.{dim}d.global.shared::cta.add.tile.bulk_group"
        expected = before.copy()
        for origin, into in places(tensor, at):
            if into is not None:
                expected[into // 4] = (int(expected[into // 4]) + int(tile[origin // 4])) % (
                    1 << 32
                )
        yield BlockCase(
            name=f"reduce add {dim}d", group="tensor", source=REDUCE, tensor=tensor, inputs=tile,
            ptx=kernel(store_body(form, at, box_bytes(tensor)), has_tensor=True), before=before,
            expected=expected,
        )  # fmt: skip


REPLACE = """
    shl.b32 %r0, %thread, 2;
    cvt.u64.u32 %a, %r0;
    add.u64 %a, %map, %a;
    ld.b32 %t, [%a];
    add.u32 %r1, %smem, %r0;
    st.shared.b32 [%r1+8192], %t;
    bar.sync 0;
    add.u32 %r2, %smem, 8192;
{replace}
    bar.sync 0;
    mov.u64 %b, maps;
    cvta.global.u64 %b, %b;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned \
[%b], [%r2], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%b], 128;
"""


def replacements() -> Iterator[BlockCase]:
    """A map changed in shared memory, published to global memory, and used from there."""
    tensor = packed((32, 8), "u16", "in", box=(32, 4))
    data = numbered(512, seed=41)
    load = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    head = "    @%first tensormap.replace.tile."
    for field, text, changed in (
        ("global_dim", f"{head}global_dim.shared::cta.b1024.b32 [%r2], 1, 3;\n",
         replace(tensor, sizes=(32, 3))),
        ("box_dim", f"{head}box_dim.shared::cta.b1024.b32 [%r2], 1, 2;\n",
         replace(tensor, box=(32, 2))),
        ("element_stride", f"{head}element_stride.shared::cta.b1024.b32 [%r2], 1, 2;\n",
         replace(tensor, element_strides=(1, 2))),
        ("swizzle_mode", f"{head}swizzle_mode.shared::cta.b1024.b32 [%r2], 2;\n",
         replace(tensor, swizzle=64)),
        ("global_stride", f"{head}global_stride.shared::cta.b1024.b64 [%r2], 0, 32;\n",
         replace(tensor, strides=(32,))),
        ("global_address", f"    add.u64 %w1, %in, 64;\n{head}"
         "global_address.shared::cta.b1024.b64 [%r2], %w1;\n", None),
    ):  # fmt: skip
        at = (0, 1)
        used = tensor if changed is None else changed
        expected = loaded(used, (0, 2) if changed is None else at, data)
        size = box_bytes(used)
        body = INIT_BARRIERS + REPLACE.replace("{replace}", text) + expect(size)
        body += f"    @%first {load} [%smem], [%b, {coordinates(at)}], [%bar];\n"
        body += wait("loaded") + dump(size)
        text = kernel(body, has_tensor=True).replace(
            ".visible", ".global .align 128 .b8 maps[128];\n.visible"
        )
        yield BlockCase(
            name=f"tensormap.replace {field}", group="tensor", source="PTX ISA 9.7.9.28",
            tensor=tensor, inputs=data, ptx=text, expected=expected,
        )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (loads, cluster_loads, stores, reductions, replacements):
        yield from cases()
