"""Tile shapes of the Hopper forward: what each head dimension, feature and length gets.

Lives here: the machine's sizes, `TileShape` and the table of shapes, all measured in
docs/notes/hopper_forward.md. Not here: what a plan makes of a shape (`sm90.py`), which plan a call
gets (`select.py`).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from fovea.plan.features import ForwardFeatures
from fovea.plan.mod_weight import adds_line, are_heavy, load_by_key

SHARED_BYTES_PER_CTA = 232448  # 227 KiB, the opt-in limit of compute capability 9.0
SHARED_ALIGNMENT = 1024  # a 128-byte swizzle atom spans 8 rows of 128 bytes
WARPGROUP_ROWS = 64  # rows of one wgmma
WIDEST_SLICE = 256  # columns of O: 128 registers of a thread
ELEMENT_BYTES = 2


class TileShape(NamedTuple):
    """Tile sizes and buffer counts of a plan."""

    tile_m: int
    tile_n: int
    kv_stages: int
    q_buffers: int
    cluster: int = 1
    skips_idle: bool = False
    spare_q: bool = False


Length = Literal["short", "medium", "long"]  # how many keys there are (`select.length_of`)

HEAD_DIMS = (64, 96, 128, 192, 256, 384, 512, 576)  # columns of tiles that there are
PAGED_HEAD_DIMS = (64, 128, 192, 256, 384, 512, 576)  # a copy from a page takes 64 columns
PACKED_HEAD_DIMS = (64, 128, 256)  # 128 threads load whole rows of them


def forward_tile(
    head_dims: tuple[int, int], features: ForwardFeatures, *, length: Length
) -> TileShape:
    """Return the tile shape of (head_dim, head_dim_v) already rounded up; V of all slices.

    Block lists want tiles that divide 128, torch's default block. Wider KV tiles cross the softmax
    less often per key; mods want narrower ones, since they need registers too. Shorter sequences
    spend their time at the ends of a query tile, where a second Q buffer helps more than width.
    """
    if head_dims == (192, 128) and not (features.block_lists or features.has_mods):
        is_banded = features.limit_left or features.limit_right or features.key_ranges
        return TileShape(128, 128, 2, 1, 1 if is_banded else 2)
    widest = max(head_dims)
    tile = _tile_shapes(features, length)[128 if widest == 96 else min(widest, 256)]
    return tile if widest <= 256 else _wide_tile(head_dims, tile, is_heavy=are_heavy(features))


def _tile_shapes(features: ForwardFeatures, length: Length) -> Mapping[int, TileShape]:
    """Return the shape of every head dimension; measured in docs/notes/hopper_forward.md."""
    wide = {192: TileShape(128, 64, 3, 1), 256: TileShape(128, 64, 2, 1)}
    if are_heavy(features):
        return {**wide, 64: TileShape(128, 64, 6, 2), 128: TileShape(128, 64, 4, 2)}
    if features.block_lists:
        has_limits = features.limit_left or features.limit_right
        if has_limits and features.block_mask_mod is not None:
            # Both in a step with 128 keys take a register too many.
            return {**wide, 64: TileShape(128, 128, 3, 2), 128: TileShape(128, 64, 4, 2)}
        return {**wide, 64: TileShape(128, 128, 3, 2), 128: TileShape(128, 128, 2, 2)}
    narrow = {**wide, 64: TileShape(192, 128, 2, 2), 128: TileShape(128, 128, 2, 2)}
    if features.mask_mod is not None:
        # Three warpgroups leave 160 registers, too few beside a mod that gathers by query and key.
        return {**narrow, 64: TileShape(128, 128, 2, 2)}
    if adds_line(features) and not (features.varlen or features.explicit_scale):
        return {**narrow, 128: TileShape(192, 80, 3, 2)}
    if features.has_mods or features.explicit_scale:
        # The lengths of a packed sequence take registers too, and so do elements read for each key:
        # 192x128 spills with them.
        is_tight = features.varlen or load_by_key(features)
        return {**narrow, 64: TileShape(192, 96, 3, 2)} if is_tight else narrow
    if features.softcap:
        # Four warpgroups have too few registers for a cap and the lengths of a packed sequence.
        tall = {**_TALL, 128: TileShape(192, 80, 3, 2)}
        return {**tall, 64: TileShape(192, 96, 3, 2)} if features.varlen else tall
    if features.key_ranges:
        return _TALL
    is_banded = features.limit_left or features.limit_right
    return _TALL_BANDED[length] if is_banded else _TALL_FULL[length]


def _wide_tile(head_dims: tuple[int, int], tile: TileShape, *, is_heavy: bool) -> TileShape:
    """Return the tile shape of head dims beyond 256, from the one of 256.

    Registers are those of 256: one slice of V. 128 rows of a wide Q fill half of shared memory and
    more, two stages of 32 keys fit beside them; of 576 columns beside 64 rows.
    """
    head_dim, head_dim_v = head_dims[0], head_dims[1] // v_slices_of(head_dims[1])
    tile = tile._replace(spare_q=False)
    if head_dim > 256 or is_heavy:
        tile = tile._replace(tile_n=32)
    if head_dim > 512:
        tile = tile._replace(tile_m=WARPGROUP_ROWS)
    room = SHARED_BYTES_PER_CTA - 2 * SHARED_ALIGNMENT  # without barriers and announcements
    room -= tile.tile_m * max(head_dim, head_dim_v) * ELEMENT_BYTES
    stages = room // (tile.tile_n * (head_dim + head_dim_v) * ELEMENT_BYTES)
    return tile._replace(kv_stages=min(stages, 4))


def v_slices_of(head_dim_v: int) -> int:
    """Return how many slices hold the columns of V."""
    return -(-head_dim_v // WIDEST_SLICE)


# The more rows read a K and V tile, the less binds what the L2 cache can deliver, and the better do
# the warpgroups hide each other's ends.
_TALL = {
    64: TileShape(256, 64, 6, 2),
    128: TileShape(192, 64, 4, 2),
    192: TileShape(128, 96, 2, 1),
    256: TileShape(128, 64, 2, 1),
}
_TALL_SHARED = {
    **_TALL,
    192: TileShape(128, 112, 2, 1, 2),
    256: TileShape(128, 64, 2, 1, 2),
}
# Sharing K and V in a cluster helps where 128 rows read them; where query tiles differ in work the
# two CTAs wait for each other, the more the shorter the walks are.
_TALL_BANDED = {
    # A tile of 128 rows sees fewer hidden keys than one of 192.
    "short": {
        **_TALL,
        128: TileShape(128, 64, 4, 2),
        256: TileShape(128, 64, 2, 1, spare_q=True),
    },
    "medium": _TALL_SHARED,
    "long": _TALL_SHARED,
}
_TALL_WHOLE = {**_TALL_SHARED, 256: TileShape(128, 64, 2, 1, 2, spare_q=True)}
_TALL_FULL = {
    "short": {
        **_TALL_WHOLE,
        64: TileShape(256, 64, 6, 2, 2),
        # 192 rows divide few lengths: idle warpgroups count where a call has few tiles a head.
        128: TileShape(192, 64, 4, 2, skips_idle=True),
    },
    "medium": {**_TALL_WHOLE, 64: TileShape(256, 64, 6, 2, 2)},
    "long": {
        **_TALL_WHOLE,
        64: TileShape(192, 128, 3, 2, 2),
        128: TileShape(192, 64, 4, 2, 2),
    },
}
# Of packed plans: one wgmma of rows, and as much of K and V on its way as fits, since what memory
# delivers is all that counts. docs/notes/hopper_decode.md has the arithmetic.
_PACKED_TILES = {
    64: TileShape(WARPGROUP_ROWS, 128, 6, 1),
    128: TileShape(WARPGROUP_ROWS, 128, 3, 1),
    256: TileShape(WARPGROUP_ROWS, 64, 3, 1),
}
# Of those with mods: a gather by head and key takes registers that half a tile of scores leaves.
_PACKED_TILES_MODS = {
    64: TileShape(WARPGROUP_ROWS, 64, 8, 1),
    128: TileShape(WARPGROUP_ROWS, 64, 6, 1),
    256: TileShape(WARPGROUP_ROWS, 64, 3, 1),
}


def packed_tile(head_dim: int, features: ForwardFeatures) -> TileShape:
    """Return the tile shape for few queries."""
    return (_PACKED_TILES_MODS if features.has_mods else _PACKED_TILES)[head_dim]
