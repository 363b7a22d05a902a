"""What the named calls ask for: makers of mods, masks, block lists and sinks.

Lives here: functions from a shape and a device to keyword arguments of `fovea.attention`. Not here:
which call has which (`cases.py`), the tensors q, k, v (`case_inputs.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from fovea import create_block_mask, mods
from fovea.testing.inputs import Shape, normal
from fovea.testing.masks import block_mask_of, random_states

Options = dict[str, Any]
MakeOptions = Callable[[Shape, torch.device], Options]

BF16 = torch.bfloat16


def fixed(**options: Any) -> MakeOptions:
    return lambda shape, device: options


def joined(*makers: MakeOptions) -> MakeOptions:
    def make(shape: Shape, device: torch.device) -> Options:
        return {k: v for maker in makers for k, v in maker(shape, device).items()}

    return make


def _keys(shape: Shape) -> int:
    return shape.k[1]


def alibi(shape: Shape, device: torch.device) -> Options:
    slopes = mods.alibi_slopes(shape.heads_q).to(device)
    return {"score_mod": mods.alibi(slopes=slopes)}


def relative_bias(shape: Shape, device: torch.device) -> Options:
    table = normal((shape.heads_q, 257), seed=5, device=device)
    return {"score_mod": mods.relative_bias(table, 128)}


def t5_bias(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": mods.t5_bias(normal((32, shape.heads_q), seed=6, device=device))}


def dense_bias(shape: Shape, device: torch.device) -> Options:
    size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
    return {"score_mod": mods.dense_bias(normal(size, seed=7, dtype=BF16, device=device))}


def key_bias(shape: Shape, device: torch.device) -> Options:
    bias = normal((_keys(shape),), seed=8, dtype=BF16, device=device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    return {"score_mod": score_mod}


def temperature(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": mods.temperature(torch.tensor(0.7, device=device))}


def tanh_mod(shape: Shape, device: torch.device) -> Options:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 20.0 * torch.tanh(score / 20.0) + torch.sin(score) * 0.01

    return {"score_mod": score_mod}


def masking_score(shape: Shape, device: torch.device) -> Options:
    """A score_mod that hides keys by -inf, a whole row among them, with a NaN branch not taken."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = torch.where(kv_idx % 3 == 0, score, float("-inf"))
        safe = torch.where(kv_idx >= 0, kept, torch.sqrt(score * 0 - 1.0))
        return torch.where(q_idx == 5, float("-inf"), safe)

    return {"score_mod": score_mod}


def gather_of_gather(shape: Shape, device: torch.device) -> Options:
    generator = torch.Generator().manual_seed(8)
    group = torch.randint(0, 17, (_keys(shape),), generator=generator).to(device)
    table = normal((17, 9), seed=9, dtype=torch.float16, device=device)
    number = torch.randint(-9, 9, (shape.seqlen_q,), generator=generator).to(torch.int16)
    number = number.to(device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[group[kv_idx], number[q_idx]]

    return {"score_mod": score_mod}


def row_reduction(shape: Shape, device: torch.device) -> Options:
    a = normal((shape.seqlen_q, 6), seed=10, device=device)
    b_rows = normal((_keys(shape), 6), seed=11, device=device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (a[q_idx] * b_rows[kv_idx]).sum()

    return {"score_mod": score_mod}


def many_row_values(shape: Shape, device: torch.device) -> Options:
    """More captured values a row than a kernel keeps in registers, each read by itself."""
    a = normal((shape.seqlen_q, 12), seed=18, device=device)
    b_rows = normal((_keys(shape), 2), seed=19, device=device)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for i in range(12):
            score = score + a[q_idx, i] * b_rows[kv_idx, i % 2]
        return score

    return {"score_mod": score_mod}


def wild_integers(shape: Shape, device: torch.device) -> Options:
    """Division, remainder and shifts of negative numbers, by ints, int64 and 0-d tensors."""
    divisor, shift = 7, 3
    step = torch.tensor(-5, device=device)  # 0-d int64
    offset = torch.arange(_keys(shape), device=device) - 40  # int64
    small = torch.arange(shape.seqlen_q, device=device).to(torch.int8)
    wide = 2**40

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        a = (q_idx - offset[kv_idx]) // divisor + (kv_idx - q_idx) % step
        c = ((kv_idx - 77) >> shift) ^ (q_idx << 1) & 31
        far = (q_idx + wide) % 11
        return score + (a + c + far + small[q_idx]) * 0.01

    return {"score_mod": score_mod}


def small_integers(shape: Shape, device: torch.device) -> Options:
    """Division and remainder of positions by ints of both signs, which fit 32 bits."""
    width, step = 20, -3

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + ((kv_idx - q_idx) // step % 7 + kv_idx % width) * 0.05

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((q_idx - kv_idx) % step == 0) | (q_idx // width == kv_idx // (h + 18))

    return {"score_mod": score_mod, "mask_mod": mask_mod}


def empty_and_host(shape: Shape, device: torch.device) -> Options:
    """A table without entries that hidden positions alone read, and a number on the host."""
    table = torch.empty(0, 3, device=device)
    step = torch.tensor(0.25)  # on the CPU

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx < 0, table[q_idx, kv_idx], score + step * (kv_idx % 3))

    return {"score_mod": score_mod}


def document(shape: Shape, device: torch.device) -> Options:
    total = max(_keys(shape), shape.seqlen_q)
    ids = (torch.arange(total) * 7 // total).to(torch.int32).to(device)
    return {"mask_mod": mods.document(ids, causal=False)}


def bool_capture(shape: Shape, device: torch.device) -> Options:
    """A padding mask as a bool tensor; all keys of the last batch entry are hidden."""
    generator = torch.Generator().manual_seed(12)
    keep = torch.rand(shape.batch, _keys(shape), generator=generator) < 0.6
    keep[-1] = shape.batch == 1
    keep = keep.to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return keep[b, kv_idx]

    return {"mask_mod": mask_mod}


def any_capture(shape: Shape, device: torch.device) -> Options:
    generator = torch.Generator().manual_seed(13)
    chosen = torch.randint(0, 40, (shape.seqlen_q, 4), generator=generator).to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (chosen[q_idx] == kv_idx // 8).any()

    return {"mask_mod": mask_mod}


def checkerboard(shape: Shape, device: torch.device) -> Options:
    return {"mask_mod": mods.checkerboard(3)}


def late_keys(shape: Shape, device: torch.device) -> Options:
    """Rows that see their first key in another KV tile than most, and rows that see none."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < q_idx * 3 % 211) & (q_idx % 5 != 2)

    return {"mask_mod": mask_mod}


def exact(
    mask_mod: Callable[[Shape, torch.device], Options], block_size: int | tuple[int, int] = 128
) -> MakeOptions:
    """Return a block mask as fovea makes it, whose lists a kernel may not have to read."""

    def make(shape: Shape, device: torch.device) -> Options:
        function = mask_mod(shape, device)["mask_mod"]
        size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
        return {"block_mask": create_block_mask(function, *size, device, block_size)}

    return make


def block_mask(mask_mod: Callable[[Shape, torch.device], Options]) -> MakeOptions:
    """Return a block mask whose lists have to be read."""

    def make(shape: Shape, device: torch.device) -> Options:
        made = exact(mask_mod)(shape, device)
        made["block_mask"].kv_num_blocks = made["block_mask"].kv_num_blocks.clone()
        return made

    return make


def softcap_mod(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": lambda score, b, h, q, kv: 12.0 * torch.tanh(score / 12.0)}


def small_tanh(shape: Shape, device: torch.device) -> Options:
    return {"score_mod": lambda score, b, h, q, kv: torch.tanh(score * 1e-6) * 1e6}


def window_mod(shape: Shape, device: torch.device) -> Options:
    return {"mask_mod": mods.sliding_window(200)}


def ranges_by_head(shape: Shape, device: torch.device) -> Options:
    """Ranges of any length that differ by row, head and batch entry; one row in ten is empty."""
    generator = torch.Generator().manual_seed(5)
    rows = (shape.batch, shape.heads_q, shape.seqlen_q)
    ends = torch.randint(0, _keys(shape) + 1, (*rows, 2), generator=generator)
    begin, end = ends.amin(-1), ends.amax(-1)
    end[..., ::10] = begin[..., ::10]
    begin, end = begin.to(device), end.to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= begin[b, h, q_idx]) & (kv_idx < end[b, h, q_idx])

    return {"mask_mod": mask_mod}


def neighbours(shape: Shape, device: torch.device) -> Options:
    """Each row sees the keys near it in an image, and the first four."""
    near = mods.natten_2d(-(-max(shape.seqlen_q, _keys(shape)) // 20), 20, 5, 7)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: near(b, h, q_idx, kv_idx) | (kv_idx < 4)}


def scattered_by_head(shape: Shape, device: torch.device) -> Options:
    """Keys of no pattern, others for each head and batch entry; some rows see none."""
    generator = torch.Generator().manual_seed(6)
    size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
    visible = torch.rand(size, generator=generator) < 0.2
    visible[:, :, 5:300:7] = False
    visible = visible.to(device)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: visible[b, h, q_idx, kv_idx]}


def far_ranges(shape: Shape, device: torch.device) -> Options:
    """Few keys a row, those of neighbouring groups of 64 rows at either end of the keys."""
    last = _keys(shape) - 40

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        begin = torch.where(q_idx // 64 % 2 == 0, q_idx % 7, last)
        return (kv_idx >= begin) & (kv_idx < begin + 1 + q_idx % 33)

    return {"mask_mod": mask_mod}


def late_rows(shape: Shape, device: torch.device) -> Options:
    """Rows past 64 see keys past 128 only, so most first keys lie in a full block."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= 100) & ((q_idx < 64) | (kv_idx >= 128)) & (q_idx != 70)

    return {"mask_mod": mask_mod}


def random_blocks(block_q: int, block_kv: int) -> MakeOptions:
    """Lists that no mask_mod gives: unordered states, empty rows, a ragged edge."""

    def make(shape: Shape, device: torch.device) -> Options:
        counts = (-(-shape.seqlen_q // block_q), -(-_keys(shape) // block_kv))
        states = random_states(shape.batch, shape.heads_q, *counts, seed=14)
        states[0, 0, 0] = 0  # a row of blocks that lists nothing
        mask = block_mask_of(
            states.to(device),
            seqlen_q=shape.seqlen_q,
            seqlen_kv=_keys(shape),
            block_q=block_q,
            block_kv=block_kv,
            mask_mod=mods.checkerboard(1),
        )
        return {"block_mask": mask}

    return make


def any_order(shape: Shape, device: torch.device) -> Options:
    """One set of lists for all batch entries and heads, each list from its last block down."""
    counts = (-(-shape.seqlen_q // 128), -(-_keys(shape) // 128))
    mask = block_mask_of(
        random_states(1, 1, *counts, seed=17).to(device),
        seqlen_q=shape.seqlen_q,
        seqlen_kv=_keys(shape),
        block_q=128,
        block_kv=128,
        mask_mod=mods.checkerboard(1),
    )
    for count, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        last = count.unsqueeze(-1) - 1
        place = torch.arange(indices.shape[-1], device=device).expand_as(indices)
        backwards = torch.where(place <= last, last - place, place).long()
        indices.copy_(indices.gather(-1, backwards))
    return {"block_mask": mask}


def partial_lists(shape: Shape, device: torch.device) -> Options:
    """Lists of partial blocks alone."""
    function = late_keys(shape, device)["mask_mod"]
    size = (shape.batch, shape.heads_q, shape.seqlen_q, _keys(shape))
    mask = create_block_mask(function, *size, device=device)
    partial = BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=function,
        seq_lengths=mask.seq_lengths,
    )
    return {"block_mask": partial}


def sink(shape: Shape, device: torch.device) -> Options:
    return {"sink": normal((shape.heads_q,), seed=15, device=device) * 3}


def sink_large(shape: Shape, device: torch.device) -> Options:
    return {"sink": torch.linspace(-300.0, 300.0, shape.heads_q, device=device)}
