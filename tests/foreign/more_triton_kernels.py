"""More Triton kernels: gradients, scans, convolutions, sorting networks, persistent fp8 products.

Lives here: kernels and the table of their arguments, which `triton_kernels.py` compiles. Not here:
launches and references (`test_more_triton.py`).
"""

from typing import Any

import triton
import triton.language as tl

SIZE, HALF = tl.constexpr(64), tl.constexpr(32)


@triton.jit
def layer_norm_gradients(x, weight, dout, dx, dweight, dbias, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < n
    value = tl.load(x + row * n + i, mask, 0.0)
    scale = tl.load(weight + i, mask, 0.0)
    grad = tl.load(dout + row * n + i, mask, 0.0)
    mean = tl.sum(value, 0) / n
    centred = tl.where(mask, value - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
    normal = centred * rstd
    scaled = grad * scale
    first = tl.sum(normal * scaled, 0) / n
    second = tl.sum(scaled, 0) / n
    tl.store(dx + row * n + i, (scaled - normal * first - second) * rstd, mask)
    tl.atomic_add(dweight + i, grad * normal, mask)
    tl.atomic_add(dbias + i, grad, mask)


@triton.jit
def attention_gradients(q, k, v, dout, lse, delta, dq, dk, dv, seqlen, scale):
    """Gradients of one tile of keys: dk and dv are its own, dq is added to."""
    key = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, SIZE)
    keys = tl.load(k + key[:, None] * SIZE + d[None, :])
    values = tl.load(v + key[:, None] * SIZE + d[None, :])
    grad_k = tl.zeros((SIZE, SIZE), tl.float32)
    grad_v = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, seqlen, HALF):
        row = start + tl.arange(0, HALF)
        at = row[:, None] * SIZE + d[None, :]
        queries, grads = tl.load(q + at), tl.load(dout + at)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(row[:, None] >= key[None, :], scores, -float("inf"))
        p = tl.exp(scores - tl.load(lse + row)[:, None])
        grad_v = tl.dot(tl.trans(p.to(tl.float16)), grads, grad_v)
        ds = p * (tl.dot(grads, tl.trans(values)) - tl.load(delta + row)[:, None]) * scale
        ds = ds.to(tl.float16)
        grad_k = tl.dot(tl.trans(ds), queries, grad_k)
        tl.atomic_add(dq + at, tl.dot(ds, keys))
    tl.store(dk + key[:, None] * SIZE + d[None, :], grad_k)
    tl.store(dv + key[:, None] * SIZE + d[None, :], grad_v)


@triton.jit
def _compose(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence(a, b, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, state = tl.associative_scan((tl.load(a + i), tl.load(b + i)), 0, _compose)
    tl.store(out + i, state)


@triton.jit
def convolution(x, weight, out, width, channels, taps):
    """Products of shifted rows: out[i, o] = sum over t and c of x[i + t, c] weight[t, c, o]."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column, inner = tl.arange(0, SIZE), tl.arange(0, HALF)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for tap in range(taps):
        for start in range(0, channels, HALF):
            c = start + inner
            at = (row + tap)[:, None] * channels + c[None, :]
            piece = tl.load(x + at, (row + tap)[:, None] < width, 0.0)
            w = tl.load(weight + (tap * channels + c)[:, None] * SIZE + column[None, :])
            total = tl.dot(piece, w, total)
    tl.store(out + row[:, None] * SIZE + column[None, :], total.to(tl.float16))


@triton.jit
def persistent_fp8(a, b, c, scales, M, N, K):
    """A persistent product through tensor maps, each row scaled at its end."""
    num_rows = tl.cdiv(M, 128)
    for tile in tl.range(tl.program_id(0), num_rows * tl.cdiv(N, 128), tl.num_programs(0)):
        row, column = (tile % num_rows) * 128, (tile // num_rows) * 128
        total = tl.zeros((128, 128), tl.float32)
        for k in tl.range(0, K, 128):
            total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
        scale = tl.load(scales + row + tl.arange(0, 128))
        c.store([row, column], (total * scale[:, None]).to(tl.float16))


@triton.jit
def best_of_rows(x, values, places, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    tile = tl.load(x + row[:, None] * BLOCK + i[None, :])
    value, place = tl.max(tile, 1, return_indices=True)
    tl.store(values + row, value)
    tl.store(places + row, place)
    ordered = tl.sort(tile, 1, descending=True)
    tl.store(x + row[:, None] * BLOCK + i[None, :], tl.cumsum(ordered, 1))


@triton.jit
def tickets(count, order, done, n):
    """Programs take numbers; the last to finish adds up what all have left."""
    mine = tl.atomic_add(count, 1)
    tl.store(order + mine, tl.program_id(0) * 10)
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel") == n - 1:
        i = tl.arange(0, 32)
        # volatile: another program's plain stores, ordered by the counter
        left = tl.load(order + i, i < n, 0, volatile=True)
        tl.store(order + n, tl.sum(left, 0))


@triton.jit
def integer_product(a, b, c, K):
    i, step = tl.arange(0, SIZE), tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.int32)
    for k in range(0, K, SIZE):
        x = tl.load(a + i[:, None] * K + k + step[None, :])
        y = tl.load(b + i[None, :] * K + (k + step)[:, None])
        total = tl.dot(x, y, total)
    tl.store(c + i[:, None] * SIZE + i[None, :], total)


def sources() -> list[tuple[str, Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """Return (name, function, argument types, constants, options) of every kernel."""
    floats = dict.fromkeys(("x", "weight", "dout", "dx", "dweight", "dbias"), "*fp32")
    halves = dict.fromkeys(("q", "k", "v", "dout"), "*fp16")
    singles = dict.fromkeys(("lse", "delta", "dq", "dk", "dv"), "*fp32")
    tile = "tensordesc<fp8e4nv[128,128]>"
    maps = {"a": tile, "b": tile, "c": "tensordesc<fp16[128,128]>", "scales": "*fp32"}
    tensors = halves | singles | {"seqlen": "i32", "scale": "fp32"}
    return [
        ("attention_gradients", attention_gradients, tensors, {}, {"num_stages": 1}),
        ("attention_gradients_pipelined", attention_gradients, tensors, {}, {"num_stages": 3}),
        ("layer_norm_gradients", layer_norm_gradients, floats | {"n": "i32", "eps": "fp32"},
         {"BLOCK": 512}, {}),
        ("recurrence", recurrence, dict.fromkeys(("a", "b", "out"), "*fp32"), {"BLOCK": 512}, {}),
        ("convolution", convolution,
         dict.fromkeys(("x", "weight", "out"), "*fp16")
         | dict.fromkeys(("width", "channels", "taps"), "i32"), {}, {"num_stages": 4}),
        ("persistent_fp8", persistent_fp8, maps | dict.fromkeys("MNK", "i32"), {},
         {"num_stages": 3, "num_warps": 8}),
        ("best_of_rows", best_of_rows, {"x": "*i32", "values": "*i32", "places": "*i32"},
         {"BLOCK": 64, "ROWS": 8}, {}),
        ("tickets", tickets, dict.fromkeys(("count", "order", "done"), "*i32") | {"n": "i32"}, {},
         {}),
        ("integer_product", integer_product, {"a": "*i8", "b": "*i8", "c": "*i32", "K": "i32"}, {},
         {}),
    ]  # fmt: skip
