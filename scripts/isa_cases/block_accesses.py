"""Block cases of loads, stores and reductions in every order and with every hint, and odd ends.

Lives here: forms that differ in ordering, caching or spelling from those of `case_forms.py`, and
the arithmetic that only sm_100 has. Invariant: each thread works on its own slot, so that no order
is needed for the value.
"""

from collections.abc import Iterator

import numpy as np
from block_copies import combine, numbered, operands
from block_table import BlockCase, kernel, registers, words

LOADS = "PTX ISA 9.7.9.8"
SLOT = "    mul.wide.u32 %a, %thread, 16;\n    add.u64 %b, %out, %a;\n    add.u64 %a, %in, %a;\n"


def thread_case(
    name: str, body: str, expected: np.ndarray, source: str, *, inputs: np.ndarray | None = None,
    before: np.ndarray | None = None, target: str = "sm_90a", group: str = "access",
) -> BlockCase:  # fmt: skip
    """Return a case of one warp; thread t reads 16 bytes at a and writes 16 bytes at b."""
    if inputs is None:
        inputs = numbered(512)
    return BlockCase(
        name=name, group=group, source=source, ptx=kernel(SLOT + body, target=target),
        inputs=words(inputs), before=before, expected=words(expected), target=target,
    )  # fmt: skip


def first_word(data: np.ndarray) -> np.ndarray:
    """Return 16-byte slots that hold the first word of those of `data`, else zero."""
    out = np.zeros((32, 4), np.uint32)
    out[:, 0] = data.reshape(32, 4)[:, 0]
    return out


def loads() -> Iterator[BlockCase]:
    """Loads of global memory in every order."""
    data = numbered(512)
    policy = "    createpolicy.fractional.L2::evict_last.b64 %w0, 0.5;\n"
    for form, operand in (
        ("ld.weak.global.b32", ""), ("ld.volatile.global.b32", ""), ("ld.b32", ""),
        ("ld.relaxed.gpu.global.b32", ""), ("ld.relaxed.sys.b32", ""),
        ("ld.acquire.gpu.global.b32", ""), ("ld.acquire.cluster.b32", ""),
        ("ld.mmio.relaxed.sys.global.b32", ""), ("ld.global.nc.b32", ""),
        ("ld.global.nc.L1::no_allocate.L2::128B.b32", ""), ("ld.global.L1::evict_last.b32", ""),
        ("ld.global.L2::cache_hint.b32", ", %w0"), ("ldu.global.b32", ""),
    ):  # fmt: skip
        body = policy * bool(operand) + f"    {form} %r1, [%a]{operand};\n"
        body += "    st.global.b32 [%b], %r1;\n"
        yield thread_case(form, body, first_word(data), LOADS, inputs=data)
    for form in ("ld.global.nc.v4.b32", "ld.weak.global.v4.u32", "ldu.global.v4.b32"):
        body = f"    {form} {registers('r', 4)}, [%a];\n"
        body += f"    st.global.v4.b32 [%b], {registers('r', 4)};\n"
        yield thread_case(form, body, data, LOADS, inputs=data)
    shared = """
    shl.b32 %r8, %thread, 2;
    add.u32 %r8, %smem, %r8;
    ld.global.b32 %r1, [%a];
"""
    for store, load in (
        ("st.volatile.shared.b32", "ld.volatile.shared.b32"),
        ("st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32"),
        ("st.release.cta.shared::cta.b32", "ld.acquire.cta.shared::cta.b32"),
    ):
        body = f"{shared}    {store} [%r8], %r1;\n    {load} %r2, [%r8];\n"
        body += "    st.global.b32 [%b], %r2;\n"
        yield thread_case(f"{store} and {load}", body, first_word(data), LOADS, inputs=data)


def stores() -> Iterator[BlockCase]:
    """Stores to global memory in every order."""
    data = numbered(512)
    load = f"    ld.global.v4.b32 {registers('r', 4)}, [%a];\n"
    for form in (
        "st.weak.global.b32", "st.volatile.global.b32", "st.relaxed.gpu.global.b32",
        "st.release.sys.global.b32", "st.release.cta.b32", "st.mmio.relaxed.sys.global.b32",
        "st.global.L1::no_allocate.b32",
    ):  # fmt: skip
        body = f"{load}    {form} [%b], %r0;\n"
        yield thread_case(form, body, first_word(data), "PTX ISA 9.7.9.11", inputs=data)
    for form in ("st.volatile.global.v4.b32", "st.relaxed.gpu.global.v4.b32"):
        body = f"{load}    {form} [%b], {registers('r', 4)};\n"
        yield thread_case(form, body, data, "PTX ISA 9.7.9.11", inputs=data)


def reductions() -> Iterator[BlockCase]:
    """red and atom on global memory, each thread at its own place."""
    source = "PTX ISA 9.7.13.6-7"
    for op, kind in (
        ("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "u64"),
        ("and", "b32"), ("or", "b64"), ("xor", "b32"), ("inc", "u32"), ("dec", "u32"),
        ("add", "f32"), ("add", "f64"),
    ):  # fmt: skip
        old, new = operands(op, kind, seed=51), operands(op, kind, seed=52)
        size = old.itemsize // 4
        register = "%w2" if size == 2 else "%r2"
        slots = [np.zeros((32, 4), np.uint32) for _ in range(3)]
        for slot, values in zip(slots, (old, new, combine(op, old, new)), strict=True):
            slot[:, :size] = values.view(np.uint32).reshape(32, size)
        for order in ("", ".relaxed.gpu", ".release.gpu"):
            form = f"red{order}.global.{op}.{kind}"
            body = f"    ld.global.b{32 * size} {register}, [%a];\n    {form} [%b], {register};\n"
            yield thread_case(form, body, slots[2], source, inputs=slots[1], before=words(slots[0]))
    for op, kind, low, high in (("add", "f16", 3, 5), ("add", "bf16", -7, 2)):
        code = {"f16": lambda x: np.float16(x).view(np.uint16),
                "bf16": lambda x: np.float32(x).view(np.uint32) >> 16}[kind]  # fmt: skip
        old, new, total = (int(code(x)) for x in (low, high, low + high))
        slots = [np.zeros((32, 4), np.uint32) for _ in range(3)]
        for slot, value in zip(slots, (old, new, total), strict=True):
            slot[:, 0] = value
        for name in ("red", "atom"):
            form = f"{name}.global.{op}.noftz.{kind}"
            result = "%h, " if name == "atom" else ""
            body = f"    ld.global.b16 %mask, [%a];\n    {form} {result}[%b], %mask;\n"
            yield thread_case(form, body, slots[2], source, inputs=slots[1], before=words(slots[0]))
        packed = [slot * np.uint32(65537) for slot in slots]
        form = f"red.global.{op}.noftz.{kind}x2"
        body = f"    ld.global.b32 %r2, [%a];\n    {form} [%b], %r2;\n"
        yield thread_case(form, body, packed[2], source, inputs=packed[1], before=words(packed[0]))
    old, new = (operands("add", "f32", seed).reshape(-1) for seed in (61, 62))
    fours = [np.repeat(values[:, None], 4, axis=1) for values in (old, new, old + new)]
    load = f"    ld.global.v4.f32 {registers('r', 4)}, [%a];\n"
    for form, result in (("red.global.add.v4.f32", ""),
                         ("atom.global.v4.f32.add", "{%r4, %r5, %r6, %r7}, ")):  # fmt: skip
        spelled = form if not result else "atom.global.add.v4.f32"
        body = f"{load}    {spelled} {result}[%b], {registers('r', 4)};\n"
        yield thread_case(spelled, body, fours[2], source, inputs=fours[1], before=words(fours[0]))


def hints() -> Iterator[BlockCase]:
    """Instructions that change no value: prefetches, policies, discards."""
    data = numbered(512)
    tail = "    ld.global.b32 %r1, [%a];\n    st.global.b32 [%b], %r1;\n"
    for text in (
        "prefetch.global.L2 [%a];", "prefetch.global.L1 [%a];", "prefetch.L1 [%a];",
        "prefetch.global.L2::evict_last [%a];", "prefetchu.L1 [%a];", "pmevent 3;", "fence.sc.gpu;",
        "applypriority.global.L2::evict_normal [%in], 128;",
        "createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %w0, [%in], 256, 512;",
        "createpolicy.cvt.L2.b64 %w0, 0x10F0000000000000;",
    ):  # fmt: skip
        body = f"    {text}\n{tail}"
        name = text.rstrip(";").partition(" ")[0]
        yield thread_case(name, body, first_word(data), "PTX ISA 9.7.9.16-18", inputs=data)
    body = """
    cvt.u64.u32 %w1, %smem;
    cvta.shared.u64 %w1, %w1;
    isspacep.shared %p, %w1;
    isspacep.global %q, %w1;
    selp.b32 %r1, 1, 0, %p;
    selp.b32 %r2, 1, 0, %q;
    isspacep.global %p, %a;
    selp.b32 %r3, 1, 0, %p;
    cvta.to.shared.u64 %w1, %w1;
    cvt.u32.u64 %r4, %w1;
    sub.u32 %r4, %r4, %smem;
    st.global.v4.b32 [%b], {%r1, %r2, %r3, %r4};
"""
    expected = np.tile(np.array([1, 0, 1, 0], np.uint32), (32, 1))
    yield thread_case("isspacep and cvta.to", body, expected, "PTX ISA 9.7.9.21-22")
    body = """
    .reg .b128 %big;
    ld.global.v2.b64 {%w1, %w2}, [%a];
    mov.b128 %big, {%w1, %w2};
    mov.b128 {%w3, %w4}, %big;
    st.global.v2.b64 [%b], {%w4, %w3};
"""
    swapped = data.reshape(32, 4)[:, [2, 3, 0, 1]]
    yield thread_case("mov.b128", body, swapped, "PTX ISA 9.7.9.7", inputs=data)
    body = """
    setp.lt.u32 %p, %thread, 20;
    ld.global.b32 %r1, [%a];
    st.global.b32 [%b], %r1;
    @%p exit;
    st.global.b32 [%b+4], %r1;
"""
    expected = first_word(data)
    expected[20:, 1] = expected[20:, 0]
    yield thread_case("exit", body, expected, "PTX ISA 9.7.12.7", inputs=data)


def pairs() -> Iterator[BlockCase]:
    """Arithmetic on pairs of floats, which sm_100 has; and redux of floats."""
    rng = np.random.default_rng(71)
    data = rng.integers(-1000, 1000, (32, 4)).astype(np.float32)
    x, y = data[:, :2].astype(np.float64), data[:, 2:].astype(np.float64)
    load = "    ld.global.v2.b64 {%w1, %w2}, [%a];\n"
    for form, operand, value in (
        ("add.rn.f32x2", "%w1, %w2", x + y), ("sub.rn.f32x2", "%w1, %w2", x - y),
        ("mul.rn.f32x2", "%w1, %w2", x * y), ("fma.rn.f32x2", "%w1, %w2, %w1", x * y + x),
        ("add.rz.ftz.f32x2", "%w1, %w2", x + y),
    ):  # fmt: skip
        body = f"{load}    {form} %w3, {operand};\n    st.global.b64 [%b], %w3;\n"
        expected = np.zeros((32, 4), np.float32)
        expected[:, :2] = value
        yield thread_case(form, body, expected, "PTX ISA 9.7.3", inputs=data, target="sm_100a")
    for form, value in (
        ("redux.sync.min.f32", data[:, 0].min()), ("redux.sync.max.f32", data[:, 0].max()),
        ("redux.sync.max.abs.f32", np.abs(data[:, 0]).max()),
    ):  # fmt: skip
        body = f"    ld.global.b32 %r1, [%a];\n    {form} %r2, %r1, 0xffffffff;\n"
        body += "    st.global.b32 [%b], %r2;\n"
        expected = np.zeros((32, 4), np.float32)
        expected[:, 0] = value
        source = "PTX ISA 9.7.13.11"
        yield thread_case(form, body, expected, source, inputs=data, target="sm_100a")


def bulk_zeros() -> Iterator[BlockCase]:
    """st.bulk clears some bytes of shared memory."""
    data = numbered(512)
    body = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %thread, 4;
    add.u32 %r3, %r1, %r2;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%a];
    st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
    bar.sync 0;
    mov.u64 %w1, 200;
    @%first st.bulk.weak.shared::cta [%r1+40], %w1, 0;
    bar.sync 0;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];
    st.global.v4.b32 [%b], {%r4, %r5, %r6, %r7};
"""
    expected = data.copy().view(np.uint8)
    expected[40:240] = 0
    yield thread_case("st.bulk.weak.shared::cta", body, expected, "PTX ISA 9.7.9.13", inputs=data,
                      target="sm_100a")  # fmt: skip


def video() -> Iterator[BlockCase]:
    """The SIMD video instructions, element by element."""
    rng = np.random.default_rng(41)
    data = rng.integers(0, 1 << 32, (32, 4), np.uint32)
    load = "    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%a];\n"
    for form, count, is_signed, more in (
        ("vabsdiff4.u32.u32.u32", 4, False, ""), ("vabsdiff4.u32.u32.u32", 4, False, ".add"),
        ("vadd2.s32.s32.s32", 2, True, ".sat"), ("vsub4.u32.u32.u32", 4, False, ""),
        ("vavrg4.u32.u32.u32", 4, False, ""), ("vmax2.s32.s32.s32", 2, True, ""),
        ("vmin4.s32.s32.s32", 4, True, ""), ("vset4.u32.u32.lt", 4, False, ""),
    ):  # fmt: skip
        bits, values = 32 // count, []
        for a, b, c, _ in data.tolist():
            elements = []
            for n in range(count):
                x, y = (v >> bits * n & (1 << bits) - 1 for v in (a, b))
                if is_signed:
                    x, y = (v - (1 << bits) * (v >> bits - 1) for v in (x, y))
                found = {"vabsdiff": abs(x - y), "vadd": x + y, "vsub": x - y, "vmax": max(x, y),
                         "vavrg": (x + y + 1) // 2, "vmin": min(x, y), "vset": int(x < y)
                         }[form.split(".")[0][:-1]]  # fmt: skip
                if more == ".sat":
                    found = min(max(found, -(1 << bits - 1)), (1 << bits - 1) - 1)
                elements.append(found)
            packed = sum((e % (1 << bits)) << bits * n for n, e in enumerate(elements))
            values.append((sum(elements) + c) % (1 << 32) if more == ".add" else packed)
        expected = np.zeros((32, 4), np.uint32)
        expected[:, 0] = values
        body = f"{load}    {form}{more} %r5, %r1, %r2, %r3;\n    st.global.b32 [%b], %r5;\n"
        yield thread_case(f"{form}{more}", body, expected, "PTX ISA 9.7.18.3-4", inputs=data)


def half_comparisons() -> Iterator[BlockCase]:
    """set with results of 16 bits and in pairs."""
    rng = np.random.default_rng(77)
    values = rng.integers(-3, 4, (32, 4)).astype(np.float16)  # a pair of a, a pair of b
    values[::7, 1] = np.nan
    data = np.zeros((32, 4), np.uint32)
    data[:, :2] = values.view(np.uint32)
    a, b = values[:, :2], values[:, 2:]
    with np.errstate(invalid="ignore"):
        less, unequal, nan = a < b, ~(a == b), np.isnan(a) | np.isnan(b)
    load = "    ld.global.v2.b32 {%r1, %r2}, [%a];\n"
    chosen = (np.arange(32) < 20)[:, None]
    for form, found, code in (
        ("set.lt.f16x2.f16x2", less, 0x3C00), ("set.nan.f16x2.f16x2", nan, 0x3C00),
        ("set.neu.u32.f16x2", unequal, 0xFFFF), ("set.lt.and.f16x2.f16x2", less & chosen, 0x3C00),
    ):  # fmt: skip
        more = ", %p" if ".and." in form else ""
        body = f"{load}    setp.lt.u32 %p, %thread, 20;\n    {form} %r3, %r1, %r2{more};\n"
        expected = np.zeros((32, 4), np.uint32)
        expected[:, 0] = (found * code).astype(np.uint16).view(np.uint32).ravel()
        yield thread_case(form, f"{body}    st.global.b32 [%b], %r3;\n", expected,
                          "PTX ISA 9.7.7.1", inputs=data)  # fmt: skip
    for form, code in (("set.lt.f16.f16", 0x3C00), ("set.lt.u16.f16", 0xFFFF)):
        body = f"{load}    mov.b32 {{%h, _}}, %r1;\n    mov.b32 {{%mask, _}}, %r2;\n"
        body += f"    {form} %h, %h, %mask;\n    cvt.u32.u16 %r3, %h;\n"
        expected = np.zeros((32, 4), np.uint32)
        expected[:, 0] = less[:, 0] * code
        yield thread_case(form, f"{body}    st.global.b32 [%b], %r3;\n", expected,
                          "PTX ISA 9.7.7.1", inputs=data)  # fmt: skip


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (loads, stores, reductions, hints, pairs, half_comparisons, bulk_zeros, video):
        yield from cases()
