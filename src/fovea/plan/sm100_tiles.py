"""Tile shapes of the Blackwell forward: what fits an SM at which head dimensions.

Lives here: the machine's sizes, `TileShape`, the arithmetic that finds it, and the map of tensor
memory. Not here: what a plan makes of it (`sm100.py`). Invariant: a shape leaves room for barriers,
announcements and row statistics; the plan checks the sum.
"""

from typing import NamedTuple

from fovea.plan.tensor_memory import TensorRegion

SHARED_BYTES_PER_CTA = 232448  # 227 KiB, the opt-in limit of compute capability 10.0
SHARED_ALIGNMENT = 1024  # a 128-byte swizzle atom spans 8 rows of 128 bytes
STREAMS = 2  # products in ping-pong: while one stream exponentiates, the other multiplies
STREAM_ROWS = 128  # rows of a product, lanes of tensor memory, threads of a warpgroup
ELEMENT_BYTES = 2
CHUNK_COLUMNS = 32  # columns of S that a thread holds at a time
TILE_HEAD_DIMS = (64, 128, 192, 256)  # columns of tiles that there are

_CONTROL_BYTES = 3 * 1024  # barriers, announcements, sums and references of rows
_MAXIMA_BYTES = 1024  # of rows, for the epilogue
_EXCHANGE_BYTES = 2 * 1024  # of maxima, between two threads that share a row
_PART_BYTES = 16 * 1024  # of a K or V tile that comes in parts: at most
_PART_COLUMNS = 64  # of head_dim, the swizzle's 128 bytes
# Products of a tile of 128 x 128, clocks by head_dim + head_dim_v (8192 operations a clock), above
# which the exponential unit (16 results a clock: 1024) has time to spare for all of them.
_SPARE_CLOCKS = 1536


class TileShape(NamedTuple):
    """Tile sizes, stages and hand-offs of a plan; `sm100.ForwardPlan` has the same fields."""

    tile_n: int
    splits_columns: bool
    k_parts: int
    v_parts: int
    k_stages: int
    v_stages: int
    shares_ring: bool
    p_parts: tuple[int, ...]
    stages_o: bool


def forward_tile(
    head_dims: tuple[int, int],
    *,
    splits_keys: bool = False,
    joins_maxima: bool = False,
    writes_rows: bool = False,
    cluster: int = 1,
) -> TileShape:
    """Return the tile shape of (head_dim, head_dim_v) already rounded up.

    In a cluster of two CTAs each holds half of every K and V tile. Where parts of K and V have the
    same bytes, they share a ring, unless the streams share their rows (`splits_keys`), whose
    products use K and V in another order where a query tile ends. With `writes_rows` O never goes
    through shared memory: packed heads lie apart, packed sequences end anywhere.

    Tensor memory has 512 columns for S and O of both streams. Up to 128 columns of V two S of 128
    columns fit beside two O, up to 192 two of 64; from there on, and where two Q tiles would leave
    shared memory no room for K and V, the streams share their rows and one O.
    """
    head_dim, head_dim_v = head_dims
    splits_columns = max(head_dims) > 192
    tile_n = 128 if head_dim_v <= 128 or splits_columns else 64
    q_stages = 1 if splits_columns or joins_maxima else STREAMS
    control = _CONTROL_BYTES + _MAXIMA_BYTES * joins_maxima + _EXCHANGE_BYTES * splits_columns
    room = SHARED_BYTES_PER_CTA - control - q_stages * STREAM_ROWS * head_dim * ELEMENT_BYTES
    # O goes straight to global memory where its tile would take a stage of K or V.
    stages_o = max(head_dims) <= 128 and not writes_rows
    room -= STREAM_ROWS * head_dim_v * ELEMENT_BYTES * stages_o
    keys = tile_n // cluster
    k_parts, v_parts, k_stages, v_stages = _kv_stages(room, keys, head_dims)
    has_equal_parts = head_dim * v_parts == head_dim_v * k_parts
    shares_ring = k_parts > 1 and has_equal_parts and not (splits_keys or splits_columns)
    if shares_ring:
        k_stages = v_stages = k_stages + v_stages
    return TileShape(
        tile_n,
        splits_columns,
        k_parts,
        v_parts,
        k_stages,
        v_stages,
        shares_ring,
        p_parts=(tile_n,) if splits_columns else (tile_n - CHUNK_COLUMNS, CHUNK_COLUMNS),
        stages_o=stages_o,
    )


def _kv_stages(room: int, keys: int, head_dims: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the parts that K and V tiles come in, and their stages, as many as fit.

    A tile is as large as one of `keys` keys.
    Where two whole tiles of both do not fit, a tile comes in parts: K by columns, V by keys. A part
    is loaded again as soon as the products are through with it, so the rings are never empty.
    """
    k_bytes, v_bytes = (keys * columns * ELEMENT_BYTES for columns in head_dims)
    k_parts, v_parts = 1, 1
    if room < 2 * (k_bytes + v_bytes):
        k_parts = head_dims[0] // _PART_COLUMNS
        while v_bytes // v_parts > _PART_BYTES:
            v_parts *= 2
    k_bytes, v_bytes = k_bytes // k_parts, v_bytes // v_parts
    tiles = room / (k_bytes * k_parts + v_bytes * v_parts)
    k_stages, v_stages = int(k_parts * tiles), int(v_parts * tiles)
    room -= k_stages * k_bytes + v_stages * v_bytes
    while room >= min(k_bytes, v_bytes):
        # The ring that holds less of a tile comes first.
        is_k_short = k_stages * v_parts <= v_stages * k_parts
        if (is_k_short and room >= k_bytes) or room < v_bytes:
            k_stages, room = k_stages + 1, room - k_bytes
        else:
            v_stages, room = v_stages + 1, room - v_bytes
    return k_parts, v_parts, k_stages, v_stages


def software_columns(head_dims: tuple[int, int], share: int) -> int:
    """Return how many columns of a chunk are exponentiated in software, at most `share`."""
    return share if 4 * sum(head_dims) < _SPARE_CLOCKS else 0


def tensor_regions(
    tile_n: int, softmax_columns: int, head_dim_v: int, *, num_outputs: int
) -> tuple[TensorRegion, ...]:
    """Return the map of tensor memory: S and P of both streams, and O.

    P takes the lower half of its S, or of each half of it that a warpgroup owns: a thread that has
    read a chunk of S may write P of that chunk, which lies in columns already read.
    """
    first_o = STREAMS * tile_n
    regions: list[TensorRegion] = []
    for stream in range(STREAMS):
        first_s = stream * tile_n
        regions.append(TensorRegion(name=f"s{stream}", first=first_s, columns=tile_n))
        for half, name in enumerate(("p", "p_upper")[: tile_n // softmax_columns]):
            regions.append(
                TensorRegion(
                    name=f"{name}{stream}",
                    first=first_s + half * softmax_columns,
                    columns=softmax_columns * ELEMENT_BYTES // 4,
                    aliases=f"s{stream}",
                )
            )
    for output in range(num_outputs):
        first = first_o + output * head_dim_v
        regions.append(TensorRegion(name=f"o{output}", first=first, columns=head_dim_v))
    return tuple(regions)
