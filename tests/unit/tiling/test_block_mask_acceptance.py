"""create_block_mask against torch's, entry for entry, on the masks people write."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from fovea.mods.picture import EXAMPLES
from fovea.tiling.block_mask import create_block_mask

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    mask_mod: Callable[..., torch.Tensor]
    batch: int | None = None
    heads: int | None = None
    seqlen_q: int = 500
    seqlen_kv: int = 500
    block: int | tuple[int, int] = 32


# ------------------------------------------------------------------- masks of positions alone


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(width):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    return mask_mod


def dilated_window(width, dilation):
    def mask_mod(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance.abs() <= width) & (distance % dilation == 0) & (distance >= 0)

    return mask_mod


def prefix_lm(prefix):
    return or_masks(lambda b, h, q_idx, kv_idx: kv_idx < prefix, causal)


def chunked(size):
    return and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)


def streaming(sinks, width):
    return and_masks(
        causal, lambda b, h, q_idx, kv_idx: (kv_idx < sinks) | (q_idx - kv_idx < width)
    )


def checkerboard(b, h, q_idx, kv_idx):
    return (q_idx // 64 + kv_idx // 64) % 2 == 0


def fine_checkerboard(b, h, q_idx, kv_idx):
    return (q_idx ^ kv_idx) & 1 == 0


def block_diffusion(length, block):
    """Training mask over [noised, clean] copies of a sequence."""

    def mask_mod(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block = torch.where(q_clean, (q_idx - length) // block, q_idx // block)
        kv_block = torch.where(kv_clean, (kv_idx - length) // block, kv_idx // block)
        own_block = (q_block == kv_block) & (q_clean == kv_clean)
        earlier_clean = (q_block > kv_block) & kv_clean & ~q_clean
        clean_causal = (q_block >= kv_block) & kv_clean & q_clean
        return own_block | earlier_clean | clean_causal

    return mask_mod


def batched_in_sequence(inner, length):
    def mask_mod(b, h, q_idx, kv_idx):
        same = q_idx // length == kv_idx // length
        return same & inner(q_idx // length, h, q_idx % length, kv_idx % length)

    return mask_mod


def natten(width, kernel):
    def mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx // width, q_idx % width
        kv_x, kv_y = kv_idx // width, kv_idx % width
        half = kernel // 2
        center_x = q_x.clamp(half, width - 1 - half)
        center_y = q_y.clamp(half, width - 1 - half)
        return ((center_x - kv_x).abs() <= half) & ((center_y - kv_y).abs() <= half)

    return mask_mod


def tiled_natten(width, kernel, tile):
    def coordinates(index):
        across = width // tile
        tile_index, inside = index // (tile * tile), index % (tile * tile)
        x = (tile_index // across) * tile + inside // tile
        y = (tile_index % across) * tile + inside % tile
        return x, y

    def mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = coordinates(q_idx)
        kv_x, kv_y = coordinates(kv_idx)
        half = kernel // 2
        return ((q_x - kv_x).abs() <= half) & ((q_y - kv_y).abs() <= half)

    return mask_mod


def morton_natten(kernel):
    def gather_bits(code):
        code = code & 0x55555555
        code = (code | (code >> 1)) & 0x33333333
        code = (code | (code >> 2)) & 0x0F0F0F0F
        code = (code | (code >> 4)) & 0x00FF00FF
        return (code | (code >> 8)) & 0x0000FFFF

    def mask_mod(b, h, q_idx, kv_idx):
        half = kernel // 2
        rows = (gather_bits(q_idx >> 1) - gather_bits(kv_idx >> 1)).abs() <= half
        return rows & ((gather_bits(q_idx) - gather_bits(kv_idx)).abs() <= half)

    return mask_mod


def sliding_tile_2d(canvas, kernel, tile, text):
    """Image tokens see a window of tiles around their own; text sees all."""
    across = canvas // tile
    image = canvas * canvas

    def mask_mod(b, h, q_idx, kv_idx):
        area = tile * tile
        q_x, q_y = (q_idx // area) // across, (q_idx // area) % across
        kv_x, kv_y = (kv_idx // area) // across, (kv_idx // area) % across
        half = kernel // 2
        center_x = q_x.clamp(half, across - 1 - half)
        center_y = q_y.clamp(half, across - 1 - half)
        near = ((center_x - kv_x).abs() <= half) & ((center_y - kv_y).abs() <= half)
        both_image = (q_idx < image) & (kv_idx < image)
        return (both_image & near) | ~both_image & (kv_idx < image + text)

    return mask_mod


def sliding_tile_3d(canvas, kernel):
    depth, height, width = canvas

    def mask_mod(b, h, q_idx, kv_idx):
        parts = []
        for size, half, divisor in (
            (depth, kernel[0] // 2, height * width),
            (height, kernel[1] // 2, width),
            (width, kernel[2] // 2, 1),
        ):
            q_part, kv_part = (q_idx // divisor) % size, (kv_idx // divisor) % size
            center = torch.clamp(q_part, min=half, max=size - 1 - half)
            parts.append((center - kv_part).abs() <= half)
        return parts[0] & parts[1] & parts[2]

    return mask_mod


def spatial_head(frame, frames_near, text):
    def mask_mod(b, h, q_idx, kv_idx):
        near = (q_idx // frame - kv_idx // frame).abs() <= frames_near
        return near | (kv_idx < text) | (q_idx < text)

    return mask_mod


def temporal_head(frame, width):
    def mask_mod(b, h, q_idx, kv_idx):
        distance = (q_idx % frame - kv_idx % frame).abs()
        return (torch.minimum(distance, frame - distance) <= width) | (kv_idx < frame)

    return mask_mod


# ------------------------------------------------------------- masks that read captured tensors


def document_ids(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def document(lengths):
    ids = document_ids(lengths)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return mask_mod


def document_rebased(inner, lengths):
    ids = document_ids(lengths)
    offsets = torch.cumsum(torch.tensor([0, *lengths]), 0)

    def mask_mod(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        q_local = q_idx - offsets[ids[q_idx]]
        kv_local = kv_idx - offsets[ids[kv_idx]]
        return same & inner(b, h, q_local, kv_local)

    return mask_mod


def packed_document(lengths):
    starts = torch.cumsum(torch.tensor([0, *lengths]), 0)[document_ids(lengths)]

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx >= starts[q_idx]) & (kv_idx <= q_idx)

    return mask_mod


def document_per_batch(*lengths):
    ids = torch.stack([document_ids(x) for x in lengths]).to(torch.int32)

    def mask_mod(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    return mask_mod


def global_window(width, length):
    is_global = torch.zeros(length, dtype=torch.bool)
    is_global[::97] = True

    def mask_mod(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx).abs() <= width) | is_global[q_idx] | is_global[kv_idx]

    return mask_mod


def vision_cross(images, text_length, image_tokens):
    """A text token sees the tokens of the image that came last before it."""
    last_image = torch.full((text_length,), -1)
    for place, index in images:
        last_image[place:] = index
    image_of = torch.arange(len(images) * image_tokens) // image_tokens

    def mask_mod(b, h, q_idx, kv_idx):
        return (last_image[q_idx] >= 0) & (image_of[kv_idx] == last_image[q_idx])

    return mask_mod


def shared_prefix(prefix, continuation):
    def mask_mod(b, h, q_idx, kv_idx):
        q_part = (q_idx - prefix) // continuation
        kv_part = (kv_idx - prefix) // continuation
        is_visible = (kv_idx < prefix) | (q_part == kv_part) & (q_idx >= prefix)
        return is_visible & (q_idx >= kv_idx)

    return mask_mod


def tree(parents, context):
    count = len(parents)
    ancestors = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx < context) | ancestors[q_idx, (kv_idx - context).clamp(min=0)]

    return mask_mod


def top_k_tiles(tile, kept, tiles, batch, heads):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(batch, heads, tiles, tiles, generator=generator).argsort(-1)[..., :kept]

    def mask_mod(b, h, q_idx, kv_idx):
        return (chosen[b, h, q_idx // tile] == kv_idx // tile).any()

    return mask_mod


def transfusion(length, spans):
    span_of = torch.full((length,), -1)
    for number, (begin, end) in enumerate(spans):
        span_of[begin:end] = number

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | ((span_of[q_idx] == span_of[kv_idx]) & (span_of[q_idx] >= 0))

    return mask_mod


def random_dense(length_q, length_kv):
    dense = torch.rand(length_q, length_kv, generator=torch.Generator().manual_seed(0)) < 0.001
    dense[64:160, 96:256] = True

    def mask_mod(b, h, q_idx, kv_idx):
        return dense[q_idx, kv_idx]

    return mask_mod


def per_head_window(heads):
    widths = 16 * torch.arange(1, heads + 1)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < widths[h]

    return mask_mod


def per_batch_length(lengths):
    used = torch.tensor(lengths)
    return lambda b, h, q_idx, kv_idx: (kv_idx < used[b]) & (q_idx >= kv_idx)


def float_threshold(length):
    times = torch.sort(torch.rand(length, generator=torch.Generator().manual_seed(0))).values
    return lambda b, h, q_idx, kv_idx: (times[q_idx] - times[kv_idx]).abs() * 2 < 0.2


def batch_and_head(b, h, q_idx, kv_idx):
    return (q_idx + 13 * b >= kv_idx) & (q_idx - kv_idx < 40 * (h + 1))


LENGTHS = [120, 1, 77, 202, 60, 40]

CASES = {
    "causal": Case(causal),
    "causal_batch_heads": Case(causal, batch=2, heads=3),
    "nothing": Case(lambda b, h, q_idx, kv_idx: q_idx < 0),
    "everything": Case(noop_mask, batch=2),
    "everything_divisible": Case(noop_mask, seqlen_q=256, seqlen_kv=512),
    "sliding_window": Case(sliding_window(100)),
    "sliding_window_default_block": Case(sliding_window(200), block=128),
    "dilated_window": Case(dilated_window(150, 5)),
    "global_window": Case(global_window(40, 500)),
    "prefix_lm": Case(prefix_lm(130)),
    "chunked": Case(chunked(100)),
    "streaming": Case(streaming(4, 60)),
    "checkerboard": Case(checkerboard),
    "fine_checkerboard": Case(fine_checkerboard),
    "block_diffusion": Case(block_diffusion(256, 16), seqlen_q=512, seqlen_kv=512),
    "batched_in_sequence": Case(batched_in_sequence(sliding_window(30), 125)),
    "natten": Case(natten(24, 7), seqlen_q=576, seqlen_kv=576),
    "tiled_natten": Case(tiled_natten(24, 7, 8), seqlen_q=576, seqlen_kv=576),
    "morton_natten": Case(morton_natten(5), seqlen_q=1024, seqlen_kv=1024),
    "sliding_tile_2d": Case(sliding_tile_2d(24, 3, 4, 20), seqlen_q=600, seqlen_kv=600),
    "sliding_tile_3d": Case(sliding_tile_3d((6, 8, 12), (3, 3, 5)), seqlen_q=576, seqlen_kv=576),
    "spatial_head": Case(spatial_head(60, 1, 50)),
    "temporal_head": Case(temporal_head(60, 3)),
    "document": Case(document(LENGTHS)),
    "document_rebased": Case(document_rebased(sliding_window(50), LENGTHS)),
    "packed_document": Case(packed_document(LENGTHS)),
    "document_per_batch": Case(document_per_batch(LENGTHS, LENGTHS[::-1], [500]), batch=3),
    "vision_cross": Case(
        vision_cross([(10, 0), (150, 1), (290, 2)], 400, 90), seqlen_q=400, seqlen_kv=270
    ),
    "shared_prefix": Case(shared_prefix(200, 100)),
    "tree": Case(tree([-1, 0, 0, 1, 1, 2, 5, 5], 96), seqlen_q=8, seqlen_kv=104, block=(8, 16)),
    "top_k_tiles": Case(
        top_k_tiles(16, 3, 12, 2, 3), batch=2, heads=3, seqlen_q=192, seqlen_kv=192, block=16
    ),
    "transfusion": Case(transfusion(500, [(20, 90), (300, 420)])),
    "random_dense": Case(random_dense(500, 430), seqlen_kv=430),
    "per_head_window": Case(per_head_window(4), batch=2, heads=4),
    "per_batch_length": Case(per_batch_length([0, 33, 500]), batch=3),
    "float_threshold": Case(float_threshold(500)),
    "batch_and_head": Case(batch_and_head, batch=3, heads=2, seqlen_q=130, seqlen_kv=190, block=16),
    "partial_function": Case(
        partial(lambda width, b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < width, 70)
    ),
    "blocks_of_two_sizes": Case(causal, seqlen_q=300, seqlen_kv=411, block=(16, 64)),
    "shorter_than_a_block": Case(causal, seqlen_q=5, seqlen_kv=77, block=128),
    "one_by_one": Case(causal, seqlen_q=1, seqlen_kv=1, block=128),
    "one_query": Case(causal, seqlen_q=1, seqlen_kv=333, block=64),
    "blocks_of_one": Case(sliding_window(3), seqlen_q=20, seqlen_kv=20, block=1),
}


@pytest.mark.parametrize("name", CASES)
def test_block_mask_of_each_mask_equals_torch(name):
    case = CASES[name]
    size = (case.batch, case.heads, case.seqlen_q, case.seqlen_kv)
    mine = create_block_mask(case.mask_mod, *size, device="cpu", BLOCK_SIZE=case.block)
    theirs = torch_create_block_mask(case.mask_mod, *size, device="cpu", BLOCK_SIZE=case.block)
    for name in LISTS:
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize("block", [8, (5, 3), 64])
@pytest.mark.parametrize("name", [e.name for e in EXAMPLES.values() if e.kind == "mask"])
def test_block_mask_of_each_library_mask_equals_torch(name, block):
    example = EXAMPLES[name]
    size = (example.batch, example.heads, example.seqlen_q, example.seqlen_kv)
    mask_mod = example.make()
    mine = create_block_mask(mask_mod, *size, device="cpu", BLOCK_SIZE=block)
    theirs = torch_create_block_mask(mask_mod, *size, device="cpu", BLOCK_SIZE=block)
    for field in LISTS:
        assert torch.equal(getattr(mine, field), getattr(theirs, field)), field
