"""Masks over images and videos: neighbourhoods in several orders of tokens, sliding tiles, SVG.

Lives here: masks whose indices stand for points of a grid. Not here: tables of selected tiles
(`sparse.py`). Invariant: a NATTEN neighbourhood is moved, never cut, at the border.
"""

from typing import Any

from fovea.errors import invalid
from fovea.mods.library.arguments import (
    check_extents,
    check_integer,
    check_multiple,
    check_odd,
)
from fovea.mods.library.combine import MaskMod


def _near(q: Any, kv: Any, extent: int, kernel: int) -> Any:
    """Return whether kv lies in the kernel around q, moved inside 0..extent-1."""
    centre = q.clamp(kernel // 2, extent - 1 - kernel // 2)
    return (centre - kv).abs() <= kernel // 2


def natten_2d(height: int, width: int, kernel_height: int, kernel_width: int) -> MaskMod:
    """Return two-dimensional neighbourhood attention over a row-major image.

    Formula: with y = i // width and x = i % width: both coordinates of kv lie within half a kernel
        of the query's, moved into the canvas.
    Shapes: seqlen_q = seqlen_kv = height * width; odd kernels, a larger one sees the whole canvas.
    Example: `natten_2d(32, 32, 7, 7)`.
    Source: https://arxiv.org/abs/2204.07143.
    """
    check_integer("height", height, 1)
    check_integer("width", width, 1)
    check_integer("kernel_height", kernel_height, 1)
    check_integer("kernel_width", kernel_width, 1)
    check_odd("kernel_height", kernel_height)
    check_odd("kernel_width", kernel_width)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = _near(q_idx // width, kv_idx // width, height, kernel_height)
        return rows & _near(q_idx % width, kv_idx % width, width, kernel_width)

    return mask_mod


def local_2d(height: int, width: int, reach_height: int, reach_width: int) -> MaskMod:
    """Return stand-alone self-attention over a row-major image: a window cut at the border.

    Formula: visible(q, kv) = |row difference| <= reach_height and |column difference| <=
        reach_width.
    Shapes: seqlen_q = seqlen_kv = height * width.
    Example: `local_2d(32, 32, 3, 3)` is a 7 x 7 window.
    Source: SASA, https://arxiv.org/abs/1906.05909.
    """
    check_integer("height", height, 1)
    check_integer("width", width, 1)
    check_integer("reach_height", reach_height, 0)
    check_integer("reach_width", reach_width, 0)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = (q_idx // width - kv_idx // width).abs() <= reach_height
        columns = (q_idx % width - kv_idx % width).abs() <= reach_width
        return rows & columns & (kv_idx < height * width)

    return mask_mod


def natten_tiled(
    canvas: tuple[int, int], kernel: tuple[int, int], tile: tuple[int, int]
) -> MaskMod:
    """Return two-dimensional neighbourhood attention over tokens stored tile by tile.

    Formula: as `natten_2d`, with the index split into tile row, tile column, row and column inside.
    Shapes: canvas, kernel and tile are (height, width); odd kernels; the canvas is a multiple of
        the tile.
    Example: `natten_tiled((32, 32), (7, 7), (8, 8))`: one tile is one half of a 128-row block.
    Source: https://arxiv.org/abs/2204.07143; tiling as in attention-gym, masks/natten.
    """
    for name, pair in (("canvas", canvas), ("kernel", kernel), ("tile", tile)):
        check_extents(name, pair, 2)
    check_odd("kernel[0]", kernel[0])
    check_odd("kernel[1]", kernel[1])
    check_multiple("canvas", canvas, tile)
    height, width = canvas
    kernel_height, kernel_width = kernel
    tile_height, tile_width = tile
    across = width // tile_width

    def point(index: Any) -> tuple[Any, Any]:
        number, inside = index // (tile_height * tile_width), index % (tile_height * tile_width)
        row = (number // across) * tile_height + inside // tile_width
        return row, (number % across) * tile_width + inside % tile_width

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_row, q_column), (kv_row, kv_column) = point(q_idx), point(kv_idx)
        rows = _near(q_row, kv_row, height, kernel_height)
        return rows & _near(q_column, kv_column, width, kernel_width)

    return mask_mod


def _gathered_bits(code: Any) -> Any:
    """Return bits 0, 2, 4, ... of a code, put next to each other."""
    code = code & 0x55555555
    code = (code | (code >> 1)) & 0x33333333
    code = (code | (code >> 2)) & 0x0F0F0F0F
    code = (code | (code >> 4)) & 0x00FF00FF
    return (code | (code >> 8)) & 0x0000FFFF


def natten_morton(height: int, width: int, kernel_height: int, kernel_width: int) -> MaskMod:
    """Return two-dimensional neighbourhood attention over tokens in Morton (Z curve) order.

    Formula: as `natten_2d`, x being the even bits of the index and y the odd ones.
    Shapes: a square canvas whose side is a power of two, at most 65536; odd kernels.
    Example: `natten_morton(32, 32, 7, 7)`.
    Source: https://arxiv.org/abs/2204.07143; Z order as in attention-gym, masks/natten.
    """
    check_integer("height", height, 1)
    check_integer("width", width, 1)
    check_integer("kernel_height", kernel_height, 1)
    check_integer("kernel_width", kernel_width, 1)
    check_odd("kernel_height", kernel_height)
    check_odd("kernel_width", kernel_width)
    if height != width or height & (height - 1) or height > 65536:
        allowed = "equal powers of two up to 65536"
        remedy = "pad the canvas, or use natten_tiled"
        raise ValueError(invalid("height, width", (height, width), allowed, remedy))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_row, kv_row = _gathered_bits(q_idx >> 1), _gathered_bits(kv_idx >> 1)
        rows = _near(q_row, kv_row, height, kernel_height)
        return rows & _near(_gathered_bits(q_idx), _gathered_bits(kv_idx), width, kernel_width)

    return mask_mod


def _near_tile(q: Any, kv: Any, tiles: int, kernel: int) -> Any:
    """Return whether kv's tile lies in the kernel of tiles around q's; even ones lean left."""
    before = kernel // 2
    after = kernel - 1 - before
    centre = q.clamp(before, tiles - 1 - after)
    return (kv >= centre - before) & (kv <= centre + after)


def sliding_tile_2d(
    canvas: tuple[int, int], kernel: tuple[int, int], tile: tuple[int, int], text: int = 0
) -> MaskMod:
    """Return sliding tile attention over an image stored tile by tile, text behind it.

    Formula: image tokens see the tiles within `kernel` around their own tile, and the text; text
        tokens see everything.
    Shapes: (height, width) each; canvas and kernel multiples of tile; seqlen is height * width +
        text.
    Example: `sliding_tile_2d((32, 32), (16, 16), (8, 8), text=64)`.
    Source: https://arxiv.org/abs/2502.04507.
    """
    for name, pair in (("canvas", canvas), ("kernel", kernel), ("tile", tile)):
        check_extents(name, pair, 2)
    check_multiple("canvas", canvas, tile)
    check_multiple("kernel", kernel, tile)
    check_integer("text", text, 0)
    size = tile[0] * tile[1]
    down, across = canvas[0] // tile[0], canvas[1] // tile[1]
    kernel_down, kernel_across = kernel[0] // tile[0], kernel[1] // tile[1]
    image = canvas[0] * canvas[1]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // size, kv_idx // size
        rows = _near_tile(q_tile // across, kv_tile // across, down, kernel_down)
        columns = _near_tile(q_tile % across, kv_tile % across, across, kernel_across)
        q_image, kv_image = q_idx < image, kv_idx < image
        to_text = (kv_idx >= image) & (kv_idx < image + text)
        return (q_image & kv_image & rows & columns) | to_text | (~q_image & kv_image)

    return mask_mod


def sliding_tile_3d(
    canvas: tuple[int, int, int],
    kernel: tuple[int, int, int],
    tile: tuple[int, int, int],
    text: int = 0,
) -> MaskMod:
    """Return sliding tile attention over a video stored tile by tile, text behind it.

    Formula: as `sliding_tile_2d` with time as the outermost dimension.
    Shapes: (time, height, width) each; canvas and kernel multiples of tile.
    Example: `sliding_tile_3d((12, 24, 24), (6, 24, 24), (6, 8, 8), text=64)`.
    Source: https://arxiv.org/abs/2502.04507.
    """
    for name, triple in (("canvas", canvas), ("kernel", kernel), ("tile", tile)):
        check_extents(name, triple, 3)
    check_multiple("canvas", canvas, tile)
    check_multiple("kernel", kernel, tile)
    check_integer("text", text, 0)
    size = tile[0] * tile[1] * tile[2]
    times, down, across = (canvas[i] // tile[i] for i in range(3))
    kernel_times, kernel_down, kernel_across = (kernel[i] // tile[i] for i in range(3))
    video = canvas[0] * canvas[1] * canvas[2]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // size, kv_idx // size
        q_layer, kv_layer = q_tile // (down * across), kv_tile // (down * across)
        layers = _near_tile(q_layer, kv_layer, times, kernel_times)
        q_row, kv_row = (q_tile // across) % down, (kv_tile // across) % down
        rows = _near_tile(q_row, kv_row, down, kernel_down)
        columns = _near_tile(q_tile % across, kv_tile % across, across, kernel_across)
        q_video, kv_video = q_idx < video, kv_idx < video
        to_text = (kv_idx >= video) & (kv_idx < video + text)
        return (q_video & kv_video & layers & rows & columns) | to_text | (~q_video & kv_video)

    return mask_mod


def svg_spatial(
    prompt: int, frame: int, width: int = 2, sees_first_frame: bool = False, multiple: int = 128
) -> MaskMod:
    """Return Sparse VideoGen's spatial head: near frames, and the prompt both ways.

    Formula: visible(q, kv) = q < prompt or kv < prompt (+ frame) or |q - kv| < width * frame
        rounded down to a multiple.
    Shapes: seqlen = prompt + frames * frame.
    Example: `svg_spatial(226, 1350, width=2)`.
    Source: https://arxiv.org/abs/2502.01776.
    """
    check_integer("prompt", prompt, 0)
    check_integer("frame", frame, 1)
    check_integer("width", width, 0)
    check_integer("multiple", multiple, 1)
    first = prompt + frame if sees_first_frame else prompt
    reach = width * frame // multiple * multiple

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx < prompt) | (kv_idx < first) | ((q_idx - kv_idx).abs() < reach)

    return mask_mod


def svg_temporal(prompt: int, frames: int, frame: int, width: int = 2) -> MaskMod:
    """Return Sparse VideoGen's temporal head: the same place in every frame, and the prompt.

    Formula: t = (index - prompt) % frame; visible = q < prompt or kv < prompt or |t_q - t_kv| <
        width * frame // frames.
    Shapes: seqlen = prompt + frames * frame.
    Example: `svg_temporal(226, 13, 1350)`.
    Source: https://arxiv.org/abs/2502.01776.
    """
    check_integer("prompt", prompt, 0)
    check_integer("frames", frames, 1)
    check_integer("frame", frame, 1)
    check_integer("width", width, 0)
    reach = width * frame // frames

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - prompt) % frame - (kv_idx - prompt) % frame
        return (q_idx < prompt) | (kv_idx < prompt) | (distance.abs() < reach)

    return mask_mod
