"""Block cases of wgmma: one warpgroup, one product of 64 rows.

Lives here: the cases and the accumulator's fragment. Invariant: operands are small whole numbers,
so that the results are exact in every order of accumulation.
"""

from collections.abc import Iterator

import numpy as np
from block_matrices import as_words, fragment
from block_numbers import FORMATS, draw, encode, results
from block_operands import Operand, k_major, mn_major
from block_table import BlockCase, fill, kernel, registers, store_registers, words

WGMMA = "PTX ISA 9.7.15.5.2"
B_AT = 16384


def accumulators(bits: np.ndarray) -> np.ndarray:
    """Return D, [register, thread]: warp w holds rows 16 w to 16 w + 15."""
    out = np.zeros((bits.shape[1] // 2, 128), bits.dtype)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for j in range(len(out)):
            row = 16 * warp + lane // 4 + 8 * (j // 2 % 2)
            out[j, thread] = bits[row, 8 * (j // 4) + lane % 4 * 2 + j % 2]
    return out


def warpgroup_fragment(codes: np.ndarray) -> np.ndarray:
    """Return A in registers, [register, thread]."""
    return np.concatenate([fragment(codes[16 * w : 16 * w + 16], 16) for w in range(4)], axis=1)


def address(operand: Operand, at: str, name: str) -> str:
    """Compute a descriptor."""
    return f"""
    shr.u32 %t, {at}, 4;
    cvt.u64.u32 %a, %t;
    or.b64 {name}, %a, {operand.wgmma_fields()};
"""


def wgmma_case(
    name: str, kinds: tuple[str, str, str], n: int, *, swizzle: int = 128, tail: str = "1, 1, 0, 0",
    signs: int = 1, steps: int | None = None, initial: bool = False, a_registers: bool = False,
    transposed: tuple[bool, bool] = (False, False), satfinite: bool = False, seed: int = 0,
) -> BlockCase:  # fmt: skip
    """Return a case: D = signs * A B^T (+ D), over one swizzle width of k."""
    d, a, b = kinds
    size = FORMATS[a][0]
    k = 32 // size
    steps = (
        (1 if any(transposed) or a_registers else (swizzle or 32) // 32) if steps is None else steps
    )
    rng = np.random.default_rng(seed)
    shape_a, shape_b = (64, k * steps), (n, k * steps)
    if d == "f16":
        x, y = rng.integers(-2, 3, shape_a), rng.integers(-2, 3, shape_b)
    else:
        x, y = draw(rng, shape_a, a), draw(rng, shape_b, b)
    start = rng.integers(-50, 51, (64, n)) if initial else np.zeros((64, n), np.int64)
    total = signs * (x @ y.T) + start
    lay_a, lay_b = (mn_major if is_t else k_major for is_t in transposed)
    narrow = 0 if swizzle == 0 else 32
    operand_a = lay_a(
        encode(x, a), swizzle if transposed[0] or steps > 1 or swizzle == 0 else narrow
    )
    operand_b = lay_b(
        encode(y, b), swizzle if transposed[1] or steps > 1 or swizzle == 0 else narrow
    )
    before = as_words(accumulators(results(start, d)))
    expected = as_words(accumulators(results(total, d)))
    inputs = [words(operand_a.raw), words(operand_b.raw), words(before)]
    body = fill(operand_a.raw.nbytes, "fill_a")
    body += fill(operand_b.raw.nbytes, "fill_b", start=operand_a.raw.nbytes, at=B_AT)
    body += "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"
    body += "    mul.wide.u32 %a, %thread, 4;\n    add.u64 %b, %in, %a;\n"
    at = operand_a.raw.nbytes + operand_b.raw.nbytes
    body += "".join(
        f"    ld.global.b32 %d{j}, [%b+{at + 512 * j}];\n" for j in range(len(expected))
    )
    first = "%w0"
    if a_registers:
        parts = warpgroup_fragment(encode(x, a))
        inputs.append(words(parts))
        at += before.nbytes
        body += "".join(
            f"    ld.global.b32 %f{j}, [%b+{at + 512 * j}];\n" for j in range(len(parts))
        )
        first = registers("f", len(parts))
    body += address(operand_a, "%smem", "%w0")
    body += f"    add.u32 %j, %smem, {B_AT};\n" + address(operand_b, "%j", "%w1")
    body += "    setp.eq.u32 %yes, %thread, %thread;\n    wgmma.fence.sync.aligned;\n"
    form = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{b}{'.satfinite' * satfinite}"
    scale = "%yes" if initial else "0"
    for step in range(steps):
        tail_of = f", {tail}" if tail else ""
        body += f"    {form} {registers('d', len(expected))}, {first}, %w1, "
        body += f"{'1' if step else scale}{tail_of};\n"
        body += "    add.u64 %w0, %w0, 2;\n    add.u64 %w1, %w1, 2;\n"
    body += "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"
    body += store_registers(len(expected))
    text = kernel(body, shared=32768, wide=(("d", len(expected)), ("f", 4)))
    return BlockCase(
        name=f"{name} {form.removeprefix('wgmma.mma_async.sync.aligned.')}", group="wgmma",
        source=WGMMA, threads=128, ptx=text, inputs=np.concatenate(inputs),
        expected=words(expected),
    )  # fmt: skip


def tail_of(a: str, *, a_registers: bool = False, signs: str = "1, 1") -> str:
    """Return the immediates after scale-d."""
    if FORMATS[a][0] == 2:
        return f"{signs}, 0" if a_registers else f"{signs}, 0, 0"
    return "" if a in ("s8", "u8") else signs


def types() -> Iterator[BlockCase]:
    """Every combination of types."""
    floats = [("f32", "bf16", "bf16"), ("f32", "f16", "f16"), ("f16", "f16", "f16"),
              ("f32", "tf32", "tf32")]  # fmt: skip
    for d in ("f32", "f16"):
        floats += [(d, a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    integers = [("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")]
    for kinds in floats + integers:
        yield wgmma_case("product", kinds, 8, tail=tail_of(kinds[1]))
        if kinds[1] == kinds[2]:
            tail = tail_of(kinds[1], a_registers=True)
            yield wgmma_case("A in registers", kinds, 8, tail=tail, a_registers=True)
    yield wgmma_case("satfinite", ("s32", "s8", "s8"), 8, tail="", satfinite=True)


def layouts() -> Iterator[BlockCase]:
    """Swizzles, K-major and MN-major, and widths of the product."""
    for name in ("bf16", "e4m3", "tf32"):
        for swizzle in (0, 32, 64):
            yield wgmma_case(
                f"swizzle {swizzle}", ("f32", name, name), 8, swizzle=swizzle, tail=tail_of(name)
            )
    for swizzle in (0, 32, 64, 128):
        for is_a, is_b in ((True, False), (False, True), (True, True)):
            n = max(swizzle // 2, 8) if is_b else 8
            yield wgmma_case(
                f"transposed {'A' * is_a}{'B' * is_b} swizzle {swizzle}", ("f32", "bf16", "bf16"),
                n, swizzle=swizzle, tail=f"1, 1, {int(is_a)}, {int(is_b)}", transposed=(is_a, is_b),
            )  # fmt: skip
    yield wgmma_case(
        "transposed AB f16",
        ("f32", "f16", "f16"),
        32,
        swizzle=64,
        tail="1, 1, 1, 1",
        transposed=(True, True),
    )
    yield wgmma_case(
        "transposed B beyond an atom", ("f32", "bf16", "bf16"), 48, swizzle=32, tail="1, 1, 0, 1",
        transposed=(False, True),
    )  # fmt: skip
    for n in (16, 24, 40):
        yield wgmma_case(f"width {n}", ("f32", "bf16", "bf16"), n, swizzle=32)


def signs_and_sums() -> Iterator[BlockCase]:
    """Negation, and a product that adds to D."""
    for name in ("bf16", "f16", "tf32", "e4m3"):
        for text, sign in (("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)):
            yield wgmma_case(
                f"signs {text.replace('-', 'minus ')}", ("f32", name, name), 8, swizzle=32,
                tail=tail_of(name, signs=text), signs=sign,
            )  # fmt: skip
    for kinds in (("f32", "bf16", "bf16"), ("f16", "f16", "f16"), ("s32", "s8", "s8")):
        yield wgmma_case("adds to D", kinds, 8, swizzle=32, tail=tail_of(kinds[1]), initial=True)


def every_case() -> Iterator[BlockCase]:
    """Yield all cases of this module."""
    for cases in (types, layouts, signs_and_sums):
        yield from cases()
