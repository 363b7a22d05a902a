"""Triton kernels and their compilation without a GPU.

Lives here: a program that `test_triton.py` starts, so that Triton is not imported in the tests'
process. Not here: launches and references. Invariant: a kernel's PTX is Triton's own, unchanged.

Usage: python triton_kernels.py FOLDER MODULE
MODULE (beside this file) has `sources`, the table of kernels.
Writes `<name>_<capability>.ptx` and `kernels.json`: what a launch needs, by that name.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (90, 100)
BM, BN, BK = tl.constexpr(128), tl.constexpr(128), tl.constexpr(64)  # a tile of a product


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask) + tl.load(y + i, mask), mask)


@triton.jit
def softmax(x, out, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + i, mask=i < n, other=-float("inf"))
    terms = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + i, terms / tl.sum(terms, 0), mask=i < n)


@triton.jit
def matmul(a, b, c, M, N, K):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    at_a = a + rows[:, None] * K + inner[None, :]
    at_b = b + inner[:, None] * N + columns[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        mask_a = (rows[:, None] < M) & (inner[None, :] < K - k)
        mask_b = (inner[:, None] < K - k) & (columns[None, :] < N)
        total = tl.dot(tl.load(at_a, mask_a, 0.0), tl.load(at_b, mask_b, 0.0), total)
        at_a += BK
        at_b += BK * N
    at_c = c + rows[:, None] * N + columns[None, :]
    tl.store(at_c, total.to(c.dtype.element_ty), (rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def matmul_tma(a, b, c, M, N, K):
    row = tl.program_id(0) * BM
    column = tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def persistent(a, b, c, M, N, K, SPECIALIZED: tl.constexpr):
    num_rows = tl.cdiv(M, BM)
    num_tiles = num_rows * tl.cdiv(N, BN)
    start, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(start, num_tiles, step, flatten=True, warp_specialize=SPECIALIZED):
        row = (tile % num_rows) * BM
        column = (tile // num_rows) * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK):
            total = tl.dot(a.load([row, k]), b.load([k, column]), total)
        c.store([row, column], total.to(c.dtype))


@triton.jit
def attention(q, k, v, out, seqlen, scale_log2, SPECIALIZED: tl.constexpr):
    row = tl.program_id(0) * BM
    queries = q.load([row, 0])
    largest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BK), tl.float32)
    for key in tl.range(0, seqlen, BK, warp_specialize=SPECIALIZED):
        scores = tl.dot(queries, k.load([key, 0]).T) * scale_log2
        new = tl.maximum(largest, tl.max(scores, 1))
        terms = tl.exp2(scores - new[:, None])
        factor = tl.exp2(largest - new)
        total = total * factor + tl.sum(terms, 1)
        acc = tl.dot(terms.to(v.dtype), v.load([key, 0]), acc * factor[:, None])
        largest = new
    out.store([row, 0], (acc / total[:, None]).to(out.dtype))


@triton.jit
def layer_norm(x, out, weight, n, eps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    values = tl.load(x + tl.program_id(0) * n + i, mask, 0.0)
    centred = tl.where(mask, values - tl.sum(values, 0) / n, 0.0)
    variance = tl.sum(centred * centred, 0) / n
    scaled = centred * tl.rsqrt(variance + eps) * tl.load(weight + i, mask)
    tl.store(out + tl.program_id(0) * n + i, scaled, mask)


@triton.jit
def scan_and_histogram(x, sums, histogram, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, i < n, 0)
    tl.store(sums + i, tl.cumsum(values, 0), i < n)
    tl.atomic_add(histogram + values % 16, 1, i < n)


@triton.jit
def sort(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.sort(tl.load(x + i)))


@triton.jit
def split_k(a, b, c, M, N, K, SPLIT: tl.constexpr):
    rows = tl.program_id(0) * 64 + tl.arange(0, 64)
    columns = tl.program_id(1) * 64 + tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for start in range(tl.program_id(2) * 32, K, 32 * SPLIT):
        k = start + tl.arange(0, 32)
        x_mask = (rows[:, None] < M) & (k[None, :] < K)
        y_mask = (k[:, None] < K) & (columns[None, :] < N)
        x = tl.load(a + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        y = tl.load(b + k[:, None] * N + columns[None, :], mask=y_mask, other=0.0)
        total = tl.dot(x, y, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.atomic_add(c + rows[:, None] * N + columns[None, :], total, mask=inside)


@triton.jit
def locked_sum(x, sums, locks, n, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    # every GROUPS-th row is added to the same sum, under a lock
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    group = row % GROUPS
    value = tl.load(x + row * n + i, mask=i < n, other=0.0)
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    if tl.load(locks + GROUPS + group) == 0:
        tl.atomic_xchg(locks + GROUPS + group, 1)
    else:
        value += tl.load(sums + group * n + i, mask=i < n, other=0.0)
    tl.store(sums + group * n + i, value, mask=i < n)
    tl.debug_barrier()  # all of the row is stored before another CTA may add to it
    tl.atomic_xchg(locks + group, 0)


@triton.jit
def scaled(a, scale_a, b, scale_b, c, K, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    i = tl.arange(0, 128)
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, K, 128):
        k = start // PACKED + tl.arange(0, 128 // PACKED)
        s = start // 32 + tl.arange(0, 4)
        x = tl.load(a + i[:, None] * (K // PACKED) + k[None, :])
        y = tl.load(b + i[None, :] * (K // PACKED) + k[:, None])
        x_scale = tl.load(scale_a + i[:, None] * (K // 32) + s[None, :])
        y_scale = tl.load(scale_b + i[:, None] * (K // 32) + s[None, :])
        total = tl.dot_scaled(x, x_scale, FORMAT, y, y_scale, FORMAT, total)
    tl.store(c + i[:, None] * 128 + i[None, :], total)


@triton.jit
def device_maps(a_pointer, b_pointer, c_pointer, M, N, K):
    a = tl.make_tensor_descriptor(a_pointer, [M, K], [K, 1], [128, 64])
    b = tl.make_tensor_descriptor(b_pointer, [N, K], [K, 1], [64, 64])
    c = tl.make_tensor_descriptor(c_pointer, [M, N], [N, 1], [128, 64])
    for tile in range(tl.program_id(0), tl.cdiv(M, 128) * tl.cdiv(N, 64), tl.num_programs(0)):
        row, column = tile // tl.cdiv(N, 64) * 128, tile % tl.cdiv(N, 64) * 64
        total = tl.zeros((128, 64), tl.float32)
        for k in range(0, K, 64):
            total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
        c.store([row, column], total.to(tl.float16))


@triton.jit
def half_sums(a, b, c, K):
    i, j, step = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, 32)
    total = tl.zeros((64, 32), tl.float16)
    for k in range(0, K, 32):
        x = tl.load(a + i[:, None] * K + k + step[None, :])
        y = tl.load(b + (k + step)[:, None] * 32 + j[None, :])
        total = tl.dot(x, y, total, out_dtype=tl.float16)
    tl.store(c + i[:, None] * 32 + j[None, :], total)


def descriptor(dtype: str, rows: int, columns: int) -> str:
    """Return the type of a tensor descriptor in a signature."""
    return f"tensordesc<{dtype}[{rows},{columns}]>"


def sources() -> list[tuple[str, Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """Return (name, function, argument types, constants, options) of every kernel."""
    vector = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    row = {"x": "*fp32", "out": "*fp32", "stride": "i32", "n": "i32"}
    sizes = {"M": "i32", "N": "i32", "K": "i32"}
    found: list[Any] = [
        ("vector_add", vector_add, vector, {"BLOCK": 1024}, {}),
        ("softmax", softmax, row, {"BLOCK": 1024}, {}),
    ]
    for name, dtype in (("f16", "fp16"), ("bf16", "bf16"), ("fp8", "fp8e4nv")):
        pointers = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32"}
        found.append((f"matmul_{name}", matmul, pointers | sizes, {}, {"num_stages": 3}))
    tensors = {
        "a": descriptor("fp16", 128, 64),
        "b": descriptor("fp16", 64, 128),
        "c": descriptor("fp16", 128, 128),
    }
    rows = {"x": "*fp32", "out": "*fp32", "weight": "*fp32", "n": "i32", "eps": "fp32"}
    integers = {"x": "*i32", "sums": "*i32", "histogram": "*i32", "n": "i32"}
    pair = {"x": "*i32", "out": "*i32"}
    found += [
        ("layer_norm", layer_norm, rows, {"BLOCK": 1024}, {}),
        ("scan_and_histogram", scan_and_histogram, integers, {"BLOCK": 1024}, {}),
        ("sort", sort, pair, {"BLOCK": 512}, {}),
    ]
    tiles = {"q": descriptor("fp16", 128, 64), "k": descriptor("fp16", 64, 64)}
    tiles |= {"v": tiles["k"], "out": tiles["q"], "seqlen": "i32", "scale_log2": "fp32"}
    for name, is_specialized in (("", 0), ("_specialized", 1)):
        chosen = {"SPECIALIZED": is_specialized}
        stages = {"num_stages": 3, "num_warps": 4}
        found.append((f"persistent{name}", persistent, tensors | sizes, chosen, stages))
        found.append((f"attention{name}", attention, tiles, chosen, stages))
    halves = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
    found += [
        ("split_k", split_k, halves | sizes, {"SPLIT": 3}, {}),
        ("locked_sum", locked_sum, {"x": "*fp32", "sums": "*fp32", "locks": "*i32", "n": "i32"},
         {"GROUPS": 2, "BLOCK": 256}, {}),
        ("device_maps", device_maps,
         {"a_pointer": "*fp16", "b_pointer": "*fp16", "c_pointer": "*fp16"} | sizes, {},
         {"num_stages": 3}),
        ("half_sums", half_sums, halves | {"c": "*fp16", "K": "i32"}, {}, {}),
    ]  # fmt: skip
    for name, dtype, packed in (("e4m3", "*fp8e4nv", 1), ("e2m1", "*u8", 2)):
        operands = {"a": dtype, "scale_a": "*u8", "b": dtype, "scale_b": "*u8", "c": "*fp32"}
        formats = {"FORMAT": name, "PACKED": packed}
        found.append((f"scaled_{name}", scaled, operands | {"K": "i32"}, formats, {}))
    for name, warps in (("matmul_tma", 4), ("matmul_tma_8_warps", 8)):
        options = {"num_stages": 3, "num_warps": warps}
        found.append((name, matmul_tma, tensors | sizes, {}, options))
    return found


def main(folder: Path, table: str) -> None:
    """Compile every kernel of a module's table for every target."""
    module = importlib.import_module(table)
    launches: dict[str, Any] = {}
    for capability in CAPABILITIES:
        for name, function, arguments, constants, options in module.sources():
            if name == "attention_specialized" and capability == 90:
                continue  # Triton 3.9.0 fails to compile it
            signature = arguments | dict.fromkeys(constants, "constexpr")
            # Addresses and sizes are multiples of 16, as Triton finds of most arguments: copies
            # become vectors, and pipelined.
            divisible = {
                (i,): [["tt.divisibility", 16]]
                for i, kind in enumerate(arguments.values())
                if kind.startswith("*") or kind == "i32"
            }
            source = ASTSource(function, signature, constexprs=constants, attrs=divisible)
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(source, target=target, options=options)
            label = f"{name}_{capability}"
            (folder / f"{label}.ptx").write_text(compiled.asm["ptx"])
            metadata = compiled.metadata._asdict()
            launches[label] = {
                "kernel": metadata["name"],
                # more than the options' warps where Triton gives warps roles of their own
                "threads": int(re.search(r"\.reqntid (\d+)", compiled.asm["ptx"])[1]),
                "shared_bytes": metadata["shared"],
                "scratch_bytes": metadata.get("global_scratch_size", 0),
                "tensor_maps": [dict(meta) for meta in metadata.get("tensordesc_meta") or ()],
            }
    report = {"triton": triton.__version__, "launches": launches}
    (folder / "kernels.json").write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
