"""Block cases of the bulk copies that take no tensor map, and of what is like them in a cluster.

Lives here: `cp.async.bulk`, `cp.reduce.async.bulk`, `st.async`, `red.async`, `cp.async`,
distributed shared memory. Not here: copies through a tensor map (`block_tensors.py`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from block_table import (
    CLUSTER_SYNC,
    INIT_BARRIERS,
    BlockCase,
    Words,
    dump,
    expect,
    fill,
    kernel,
    wait,
    words,
)

BULK = "PTX ISA 9.7.9.25.4.1"
REDUCE = "PTX ISA 9.7.9.25.4.2"
SIZE = 512
POLICY = "    createpolicy.fractional.L2::evict_first.b64 %w0, 1.0;\n"


def numbered(size: int, seed: int = 0) -> Words:
    """Return `size` bytes of random words."""
    return np.random.default_rng(seed).integers(0, 1 << 32, size // 4, np.uint32)


def loads() -> Iterator[BlockCase]:
    """Global to shared memory."""
    hint = ".L2::cache_hint"
    for space in ("shared::cta", "shared::cluster"):
        for is_hinted in (False, True):
            form = f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes"
            form += hint * is_hinted
            policy = ", %w0" if is_hinted else ""
            copy = f"    @%first {form} [%smem], [%in], {SIZE}, [%bar]{policy};\n"
            body = INIT_BARRIERS + POLICY * is_hinted + expect(SIZE) + copy
            body += wait("loaded") + dump(SIZE)
            data = numbered(SIZE)
            yield BlockCase(
                name=form, group="bulk", source=BULK, ptx=kernel(body), inputs=data, expected=data
            )
    body = INIT_BARRIERS + expect(16)
    body += "    @%first cp.async.bulk.prefetch.L2.global [%in], 16;\n"
    form = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    body += f"    @%first {form} [%smem+32], [%in+48], 16, [%bar];\n"
    body += wait("loaded") + dump(16, at=32)
    data = numbered(64)
    yield BlockCase(
        name="cp.async.bulk.prefetch.L2.global, 16 bytes at offsets", group="bulk", source=BULK,
        ptx=kernel(body), inputs=data, expected=data[12:],
    )  # fmt: skip


def cluster_copies() -> Iterator[BlockCase]:
    """Copies that reach the other CTA of a pair."""
    data = numbered(SIZE)
    form = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    body = INIT_BARRIERS + expect(SIZE) + CLUSTER_SYNC + "    mov.u16 %mask, 3;\n"
    body += f"    @%lead {form} [%smem], [%in], {SIZE}, [%bar], %mask;\n"
    body += wait("loaded") + dump(SIZE) + CLUSTER_SYNC
    yield BlockCase(
        name=form, group="bulk", source=BULK, ptx=kernel(body, cluster=2), cluster=2,
        inputs=data, expected=np.concatenate([data, data]),
    )  # fmt: skip
    form = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    push = f"""
    fence.proxy.async.shared::cta;
    {CLUSTER_SYNC}
    xor.b32 %r0, %rank, 1;
    mapa.shared::cluster.u32 %r1, %smem, %r0;
    mapa.shared::cluster.u32 %r2, %bar, %r0;
    add.u32 %r1, %r1, {SIZE};
    @%first {{op}} [%r1], [%smem], {SIZE}, [%r2];
"""
    offset = f"    mul.wide.u32 %b, %rank, {SIZE};\n    add.u64 %in, %in, %b;\n"
    body = INIT_BARRIERS + expect(SIZE) + offset + fill(SIZE)
    body += push.format(op=form) + wait("pushed") + dump(SIZE, at=SIZE) + CLUSTER_SYNC
    data = numbered(2 * SIZE)
    half = len(data) // 2
    yield BlockCase(
        name=form, group="bulk", source=BULK, ptx=kernel(body, cluster=2), cluster=2,
        inputs=data, expected=np.concatenate([data[half:], data[:half]]),
    )  # fmt: skip
    for op, kind in (
        ("add", "u32"), ("add", "s32"), ("add", "u64"), ("inc", "u32"), ("dec", "u32"),
        ("min", "u32"), ("max", "s32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ):  # fmt: skip
        form = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        form += f".{op}.{kind}"
        old, new = operands(op, kind, seed=1), operands(op, kind, seed=2)
        both = np.concatenate([words(old), words(new)])
        size = words(old).nbytes
        body = INIT_BARRIERS + expect(size)
        body += fill(size, "fill_new", start=size) + fill(size, "fill_old", at=SIZE)
        body += push.format(op=form).replace(f"[%smem], {SIZE},", f"[%smem], {size},")
        body += wait("pushed") + dump(size, at=SIZE) + CLUSTER_SYNC
        result = words(combine(op, old, new))
        yield BlockCase(
            name=form, group="bulk", source=REDUCE, ptx=kernel(body, cluster=2), cluster=2,
            inputs=both, expected=np.concatenate([result, result]),
        )  # fmt: skip


DTYPES: dict[str, Any] = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
          "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64,
          "f16": np.float16, "bf16": np.float32}  # fmt: skip


def operands(op: str, kind: str, seed: int) -> np.ndarray:
    """Return 32 elements; floats are small integers, so that sums are exact in every format."""
    rng = np.random.default_rng(seed)
    if kind[0] in "fb" and kind not in ("b32", "b64"):
        return rng.integers(-64, 64, 32).astype(DTYPES[kind])
    if op in ("inc", "dec"):
        return rng.integers(0, 6, 32).astype(np.uint32)
    bits = 64 if "64" in kind else 32
    return rng.integers(0, 1 << 63, 32, np.uint64).astype(f"uint{bits}").view(DTYPES[kind])


def combine(op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return what a reduction leaves: the manual's formulas."""
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    function = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[op]  # fmt: skip
    with np.errstate(over="ignore"):
        return function(old, new)


def storage(kind: str, values: np.ndarray) -> Words:
    """Return elements as words; bf16 is held in float32 and is its upper half."""
    if kind == "bf16":
        return words((values.view(np.uint32) >> 16).astype(np.uint16))
    return words(values)


STORE_END = """
    @%first cp.async.bulk.commit_group;
    @%first cp.async.bulk.wait_group 0;
"""


def stores() -> Iterator[BlockCase]:
    """Shared to global memory, plain and combining."""
    hint = ".L2::cache_hint"
    for is_hinted in (False, True):
        form = "cp.async.bulk.global.shared::cta.bulk_group" + hint * is_hinted
        policy = ", %w0" if is_hinted else ""
        body = fill(SIZE) + POLICY * is_hinted
        body += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
        body += f"    @%first {form} [%out], [%smem], {SIZE}{policy};\n" + STORE_END
        data = numbered(SIZE)
        yield BlockCase(
            name=form, group="bulk", source=BULK, ptx=kernel(body), inputs=data, expected=data
        )
    integers = [(op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32", "u64")]
    integers += [(op, "s64") for op in ("min", "max")]
    integers += [(op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")]
    integers += [("inc", "u32"), ("dec", "u32")]
    floats = [("add", "f32"), ("add", "f64"), ("add.noftz", "f16"), ("add.noftz", "bf16")]
    floats += [(op, kind) for op in ("min", "max") for kind in ("f16", "bf16")]
    for op, kind in integers + floats:
        form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind}"
        old, new = operands(op, kind, seed=3), operands(op, kind, seed=4)
        data = storage(kind, new)
        body = fill(data.nbytes) + "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
        body += f"    @%first {form} [%out], [%smem], {data.nbytes};\n" + STORE_END
        result = combine(op.partition(".")[0], old, new)
        yield BlockCase(
            name=form, group="bulk", source=REDUCE, ptx=kernel(body), inputs=data,
            before=storage(kind, old), expected=storage(kind, result),
        )  # fmt: skip


def cluster_stores() -> Iterator[BlockCase]:
    """Single values to the other CTA: st.async, red.async, and ordinary remote accesses."""
    address = """
    xor.b32 %r0, %rank, 1;
    shl.b32 %r3, %thread, 4;
    add.u32 %r3, %smem, %r3;
    mapa.shared::cluster.u32 %r1, %r3, %r0;
    mapa.shared::cluster.u32 %r2, %bar, %r0;
    mad.lo.u32 %r4, %rank, 1000, %thread;
    cvt.u64.u32 %w1, %r4;
"""
    for vec, kind, values in (
        ("", "b32", "%r4"), ("", "u64", "%w1"), (".v2", "b32", "{%r4, %thread}"),
        (".v4", "b32", "{%r4, %thread, %rank, %r4}"), (".v2", "s64", "{%w1, %w1}"),
    ):  # fmt: skip
        count = {"": 1, ".v2": 2, ".v4": 4}[vec] * (2 if "64" in kind else 1)
        form = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vec}.{kind}"
        body = INIT_BARRIERS + expect(32 * 4 * count) + CLUSTER_SYNC + address
        body += f"    {form} [%r1], {values}, [%r2];\n" + wait("stored")
        body += _dump_own(count) + CLUSTER_SYNC
        expected = np.zeros((2, count, 32), np.uint32)
        for rank in range(2):
            sent = (1 - rank) * 1000 + np.arange(32)
            by_word = {
                "b32": [sent, np.arange(32), np.full(32, 1 - rank), sent],
                "u64": [sent, 0], "s64": [sent, 0, sent, 0],
            }[kind]  # fmt: skip
            for j in range(count):
                expected[rank, j] = by_word[j]
        yield BlockCase(
            name=form, group="cluster", source="PTX ISA 9.7.9.12", ptx=kernel(body, cluster=2),
            cluster=2, expected=words(expected),
        )  # fmt: skip
    yield from _remote_reductions(address)
    yield from _remote_accesses()


def _dump_own(count: int) -> str:
    """Thread t stores word j of its 16 bytes to word (rank * count + j) * 32 + t of `out`."""
    lines = [f"    mad.lo.u32 %r5, %rank, {32 * count}, %thread;", "    mul.wide.u32 %a, %r5, 4;"]
    lines.append("    add.u64 %a, %out, %a;")
    for j in range(count):
        lines.append(f"    ld.shared.b32 %t, [%r3+{4 * j}];")
        lines.append(f"    st.global.b32 [%a+{128 * j}], %t;")
    return "\n".join(lines) + "\n"


def _remote_reductions(address: str) -> Iterator[BlockCase]:
    for op, kind in (
        ("add", "u32"), ("add", "s32"), ("add", "u64"), ("inc", "u32"), ("dec", "u32"),
        ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ):  # fmt: skip
        form = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
        form += f".{op}.{kind}"
        is_wide = kind == "u64"
        count = 2 if is_wide else 1
        old, new = operands(op, kind, seed=5), operands(op, kind, seed=6)
        size = 4 * count
        body = INIT_BARRIERS + expect(32 * size) + address
        load = f"    mul.wide.u32 %a, %thread, {size};\n    add.u64 %a, %in, %a;\n"
        if is_wide:
            load += f"    ld.global.b64 %w2, [%a];\n    ld.global.b64 %w3, [%a+{32 * size}];\n"
            load += "    st.shared.b64 [%r3], %w2;\n"
        else:
            load += f"    ld.global.b32 %r6, [%a];\n    ld.global.b32 %r7, [%a+{32 * size}];\n"
            load += "    st.shared.b32 [%r3], %r6;\n"
        body += load + CLUSTER_SYNC
        body += f"    {form} [%r1], {'%w3' if is_wide else '%r7'}, [%r2];\n" + wait("stored")
        body += _dump_own(count) + CLUSTER_SYNC
        result = combine(op, old, new).view(np.uint32).reshape(32, count).T
        yield BlockCase(
            name=form, group="cluster", source="PTX ISA 9.7.13.7", ptx=kernel(body, cluster=2),
            cluster=2, inputs=np.concatenate([words(old), words(new)]),
            expected=words(np.stack([result, result])),
        )  # fmt: skip


def _remote_accesses() -> Iterator[BlockCase]:
    own = """
    mad.lo.u32 %r4, %rank, 1000, %thread;
    shl.b32 %r3, %thread, 2;
    add.u32 %r3, %smem, %r3;
    xor.b32 %r0, %rank, 1;
    mapa.shared::cluster.u32 %r1, %r3, %r0;
"""
    store = """
    mad.lo.u32 %r5, %rank, 32, %thread;
    mul.wide.u32 %a, %r5, 4;
    add.u64 %a, %out, %a;
    st.global.b32 [%a], %r6;
"""
    thread = np.arange(32)
    for name, act, expected in (
        (
            "ld.shared::cluster.b32",
            f"    st.shared.b32 [%r3], %r4;\n{CLUSTER_SYNC}"
            "    ld.shared::cluster.b32 %r6, [%r1];\n",
            [1000 + thread, thread],
        ),
        (
            "st.shared::cluster.b32",
            f"    st.shared::cluster.b32 [%r1], %r4;\n{CLUSTER_SYNC}"
            "    ld.shared.b32 %r6, [%r3];\n",
            [1000 + thread, thread],
        ),
        (
            "atom.shared::cluster.add.u32",
            f"    st.shared.b32 [%r3], %r4;\n{CLUSTER_SYNC}"
            "    atom.shared::cluster.add.u32 %r7, [%r1], 5;\n"
            f"{CLUSTER_SYNC}    ld.shared.b32 %r6, [%r3];\n    add.u32 %r6, %r6, %r7;\n",
            [1005 + 2 * thread, 1005 + 2 * thread],
        ),
        (
            "getctarank.shared::cluster.u32",
            "    getctarank.shared::cluster.u32 %r6, %r1;\n",
            [np.ones(32), np.zeros(32)],
        ),
    ):
        yield BlockCase(
            name=name, group="cluster", source="PTX ISA 9.7.9.8 (mapa: 9.7.9.24)",
            ptx=kernel(own + act + store + CLUSTER_SYNC, cluster=2), cluster=2,
            expected=words(np.stack(expected).astype(np.uint32)),
        )  # fmt: skip


def small_copies() -> Iterator[BlockCase]:
    """cp.async of 4, 8 and 16 bytes, with zero fill, groups and mbarriers."""
    address = """
    shl.b32 %r3, %thread, 4;
    add.u32 %r3, %smem, %r3;
    mul.wide.u32 %a, %thread, 16;
    add.u64 %a, %in, %a;
    mov.u32 %t, 0;
    st.shared.v4.b32 [%r3], {%t, %t, %t, %t};
    bar.sync 0;
"""
    group = "    cp.async.commit_group;\n    cp.async.wait_group 0;\n    bar.sync 0;\n"
    everything = "    cp.async.wait_all;\n    bar.sync 0;\n"
    data = numbered(SIZE)
    rows = data.reshape(32, 4)
    for form, size, taken, end in (
        ("cp.async.ca.shared::cta.global", 4, 4, group), ("cp.async.ca.shared.global", 8, 8, group),
        ("cp.async.ca.shared.global.L2::128B", 16, 16, everything),
        ("cp.async.cg.shared.global", 16, 16, group),
        ("cp.async.cg.shared::cta.global.L2::64B", 16, 16, everything),
        ("cp.async.ca.shared.global", 8, 4, group), ("cp.async.cg.shared.global", 16, 8, group),
        ("cp.async.cg.shared.global", 16, 0, group),
    ):  # fmt: skip
        partial = "" if taken == size else f", {taken}"
        body = f"{address}    {form} [%r3], [%a], {size}{partial};\n{end}" + dump(SIZE)
        expected = np.zeros((32, 4), np.uint32)
        expected[:, : taken // 4] = rows[:, : taken // 4]
        yield BlockCase(
            name=f"{form}, {size} bytes" + (f", {taken} of them read" if partial else ""),
            group="async", source="PTX ISA 9.7.9.25.3.1", ptx=kernel(body), inputs=data,
            expected=words(expected),
        )  # fmt: skip
    for form, count in (("cp.async.mbarrier.arrive.noinc.shared.b64", 32),
                        ("cp.async.mbarrier.arrive.shared.b64", 1)):  # fmt: skip
        init = f"    @%first mbarrier.init.shared::cta.b64 [%bar], {count};\n    bar.sync 0;\n"
        arrive = (
            ""
            if count == 32
            else "    bar.sync 0;\n    @%first mbarrier.arrive.shared.b64 %state, [%bar];\n"
        )
        body = init + address + "    cp.async.ca.shared.global [%r3], [%a], 16;\n"
        body += f"    {form} [%bar];\n{arrive}" + wait("copied") + dump(SIZE)
        yield BlockCase(
            name=form, group="async", source="PTX ISA 9.7.13.16.15", ptx=kernel(body), inputs=data,
            expected=data,
        )  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (loads, cluster_copies, stores, cluster_stores, small_copies):
        yield from cases()
