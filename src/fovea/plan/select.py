"""Which plan a call gets, and what a kernel backend lacks.

Lives here: the map from an `AttentionProblem` to a plan, with the reason wherever it says no. Not
here: what the plans are (`sm90.py`), the checks of user input (`problem/`). Invariant:
`unsupported` returns None exactly where `forward_plan` returns a plan.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fovea.arch import Arch
from fovea.mods.graph import Graph
from fovea.plan import sm90, sm90_tiles, sm100, sm100_tiles
from fovea.plan.features import ForwardFeatures
from fovea.plan.forward import ForwardPlan
from fovea.plan.integers import NARROW_LIMIT
from fovea.plan.kernel_calls import as_kernel_call
from fovea.problem import AttentionProblem
from fovea.tiling import split_kv
from fovea.tiling.bounds import Band, Side, kv_range, larger, smaller
from fovea.tiling.split_kv import MAX_SPLITS, SplitDemand

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_FLOATS = ("f32", "f16", "bf16")  # of mods in kernels
_TILE_HEAD_DIMS = {
    "sm90": sm90_tiles.HEAD_DIMS,
    "sm100": sm100_tiles.TILE_HEAD_DIMS,
    "sm103": sm100_tiles.TILE_HEAD_DIMS,
}
# A copy from a page takes 64 columns.
_PAGED_HEAD_DIMS = {**_TILE_HEAD_DIMS, "sm90": sm90_tiles.PAGED_HEAD_DIMS}
# Keys up to which a call gets the plan for short sequences, and that for those of medium length.
SHORT_SEQLEN, MEDIUM_SEQLEN = 1024, 2048
# Queries up to which a call gets the plan for few. One warpgroup then multiplies at a time, which
# pays as long as K and V come slower than it works through them.
FEW_QUERIES = 64
# Queries from which CTAs of Blackwell work in pairs: at most an eighth of the rows is idle.
PAIR_QUERIES = 2048
# What parts of the keys may take of the GPU's memory: most rows of a packed batch may be idle.
_PARTIAL_BYTES = 2**28
_L2_BYTES = 50 * 1024**2  # of an H100; an H200 has 60
_MAX_SEQLEN = 2**30  # positions and their sums stay in 32 bits


def unsupported(problem: AttentionProblem, arch: Arch) -> str | None:
    """Return what the kernels of an architecture lack for a problem, or None if they take it."""
    problem = as_kernel_call(problem, arch)
    return (
        _lacking_dtype(problem)
        or _lacking_head_dim(problem, arch)
        or _lacking_layout(problem)
        or _lacking_pages(problem, arch)
        or _lacking_blocks(problem, arch)
        or _lacking_mods(problem)
    )


def forward_plan(problem: AttentionProblem, arch: Arch) -> ForwardPlan:
    """Return the forward plan of a problem that `unsupported` has nothing against."""
    problem = as_kernel_call(problem, arch)
    dtype = "bfloat16" if problem.dtype == torch.bfloat16 else "float16"
    features = forward_features(problem)
    page_size = problem.k.shape[1] if problem.is_paged else None
    if arch.name == "sm90":
        if _packs_heads(problem, features):
            widest = _rounded(
                max(problem.head_dim, problem.head_dim_v), sm90_tiles.PACKED_HEAD_DIMS
            )
            return sm90.make_packed_plan(dtype, widest, features, page_size=page_size)
        length = length_of(problem.seqlen_kv)
        return sm90.make_forward_plan(
            dtype, tile_head_dims(problem), features, length=length, page_size=page_size
        )
    return sm100.make_forward_plan(
        dtype,
        _blackwell_head_dims(problem),
        features,
        arch="sm100" if arch.name == "sm100" else "sm103",
        splits_keys=_splits_keys(problem),
        packs_heads=_packs_heads_on_blackwell(problem, features),
        is_pair=_is_pair(problem, features),
        page_size=page_size,
    )


def length_of(seqlen_kv: int) -> sm90_tiles.Length:
    """Return the class of plans for a number of keys."""
    if seqlen_kv <= SHORT_SEQLEN:
        return "short"
    return "medium" if seqlen_kv <= MEDIUM_SEQLEN else "long"


def _splits_keys(problem: AttentionProblem) -> bool:
    """Return whether 128 query rows have to do for both streams of a Blackwell plan."""
    lists = problem.block_lists
    if lists is not None:
        return lists.block_q % sm100.TILE_M != 0
    return problem.seqlen_q <= FEW_QUERIES


def _packs_heads_on_blackwell(problem: AttentionProblem, features: ForwardFeatures) -> bool:
    """Return whether a call gets a Blackwell plan for few queries."""
    rows = problem.seqlen_q if problem.varlen is None else problem.q.shape[0]
    is_small = rows * problem.group_size < _MAX_SEQLEN
    return problem.seqlen_q <= FEW_QUERIES and is_small and not features.block_lists


def _is_pair(problem: AttentionProblem, features: ForwardFeatures) -> bool:
    """Return whether CTAs of a Blackwell plan multiply in pairs.

    Each then loads and reads half of K and V. A walk serves twice as many rows: of a short sequence
    more of them are idle, and under a band the upper half sits through tiles of the lower one. With
    one O a CTA, the bytes of K and V bind, and pairs pay under a band, too.
    """
    head_dims = _blackwell_head_dims(problem)
    if features.block_lists or features.varlen or head_dims[1] % 128 != 0:
        return False
    if problem.seqlen_q < PAIR_QUERIES:
        return False
    is_banded = features.limit_left or features.limit_right
    return max(head_dims) > 192 or (not is_banded and head_dims[0] > 64)


def _packs_heads(problem: AttentionProblem, features: ForwardFeatures) -> bool:
    """Return whether a call gets the plan for few queries."""
    # Rows of packed sequences, idle ones too, times heads stay in 32 bits.
    rows = problem.seqlen_q if problem.varlen is None else problem.q.shape[0]
    is_small = rows * problem.group_size < _MAX_SEQLEN
    has_map = features.block_lists or features.key_ranges  # of query tiles, which count no heads
    is_wide = max(problem.head_dim, problem.head_dim_v) > sm90_tiles.PACKED_HEAD_DIMS[-1]
    is_one_width = problem.head_dim == problem.head_dim_v in sm90_tiles.PACKED_HEAD_DIMS
    if is_wide or (problem.is_paged and not is_one_width):
        return False
    return problem.seqlen_q <= FEW_QUERIES and is_small and not has_map


def num_splits(problem: AttentionProblem, plan: ForwardPlan, num_sms: int) -> int:
    """Return how many parts the keys of a call are cut into; 1 unless its plan packs heads.

    A function of shapes and of the machine alone: nothing is read from a device.
    """
    if not plan.packs_heads:
        return 1
    problem = as_kernel_call(problem)
    tiles_per_head = -(-problem.seqlen_q * problem.group_size // plan.tile_m)
    spans = [
        kv_range(
            tile,
            band_of(problem),
            seqlen_q=problem.seqlen_q,
            seqlen_kv=problem.seqlen_kv,
            tile_m=plan.tile_m,
            tile_n=plan.tile_n,
            group_size=problem.group_size,
        )
        for tile in range(tiles_per_head)
    ]
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.q.element_size()
    demand = SplitDemand(
        num_tiles=problem.batch * problem.heads_kv * tiles_per_head,
        query_tiles_per_head=tiles_per_head,
        num_kv_tiles=max((int(span.end) - int(span.first) for span in spans), default=0),
        kv_head_bytes=problem.seqlen_kv * row_bytes,
        is_banded=plan.is_banded,
    )
    rows = problem.q.shape[:-2].numel() * problem.heads_q
    most = min(MAX_SPLITS, max(1, _PARTIAL_BYTES // max(1, rows * plan.head_dim_v * 4)))
    return split_kv.num_splits(demand, num_sms=num_sms, l2_bytes=_L2_BYTES, max_splits=most)


def forward_features(problem: AttentionProblem) -> ForwardFeatures:
    """Return the compile-time features of a problem."""
    band = band_of(problem)
    lists = problem.block_lists
    block_mask_mod = problem.block_mask_mod
    return ForwardFeatures(
        limit_left=band.left is not None,
        limit_right=band.right is not None,
        softcap=problem.softcap is not None,
        # Folding the scale behind the maximum needs a scale > 0.
        explicit_scale=not isinstance(problem.scale, Tensor) and problem.scale <= 0,
        sink=problem.sink is not None,
        max_score=problem.wants_max_score,
        score_mod=problem.score_mod.graph if problem.score_mod else None,
        mask_mod=problem.mask_mod.graph if problem.mask_mod else None,
        block_lists=lists is not None,
        full_lists=lists is not None and lists.full_kv_num_blocks is not None,
        block_mask_mod=block_mask_mod.graph if lists is not None and block_mask_mod else None,
        block_bits=problem.mask_bits is not None,
        key_ranges=problem.key_ranges is not None,
        wide_integers=needs_wide_integers(problem),
        varlen=problem.varlen is not None,
    )


def band_of(problem: AttentionProblem) -> Band:
    """Return the visible band of a problem's causal and window arguments, and of its limits."""
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
    band = Band.of(problem.causal, problem.window, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    least, largest = problem.limits
    return replace(
        band,
        left=_nearer(band.left, None if least is None else band.offset - least, problem),
        right=_nearer(band.right, None if largest is None else largest - band.offset, problem),
    )


def _nearer(side: Side, limit: Side, problem: AttentionProblem) -> Side:
    """Return the tighter of two limits of a side, cut to what any two positions can differ by."""
    if limit is None:
        return side
    widest = problem.seqlen_q + problem.seqlen_kv
    limit = larger(smaller(limit, widest), -widest)
    return limit if side is None else smaller(side, limit)


def tile_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Return the columns of the tiles of Q and K, and of all slices of V, on Hopper.

    The copy engine fills the columns past the tensors' own with zeros.
    """
    columns = sm90_tiles.PAGED_HEAD_DIMS if problem.is_paged else sm90_tiles.HEAD_DIMS
    return _rounded(problem.head_dim, columns), _rounded(problem.head_dim_v, columns)


def _blackwell_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Return the columns of the tiles of Q and K, and of V, on Blackwell."""
    columns = sm100_tiles.TILE_HEAD_DIMS
    return _rounded(problem.head_dim, columns), _rounded(problem.head_dim_v, columns)


def _rounded(head_dim: int, columns: tuple[int, ...]) -> int:
    """Return the least number of columns that there is and that holds a head dimension."""
    return next(each for each in columns if head_dim <= each)


def needs_wide_integers(problem: AttentionProblem) -> bool:
    """Return whether a mod may leave 32-bit index arithmetic: a long sequence or a large number."""
    mods = (problem.score_mod, problem.mask_mod, problem.block_mask_mod)
    present = [mod for mod in mods if mod is not None]
    if not present:
        return False
    if max(problem.seqlen_q, problem.seqlen_kv) >= NARROW_LIMIT:
        return True
    return any(
        isinstance(value, int) and abs(value) >= NARROW_LIMIT
        for mod in present
        for value in mod.scalars
    )


def _lacking_dtype(problem: AttentionProblem) -> str | None:
    if problem.dtype in _DTYPES:
        return None
    return f"dtype={problem.dtype} (kernels take torch.bfloat16 and torch.float16)"


def _lacking_head_dim(problem: AttentionProblem, arch: Arch) -> str | None:
    widest, largest = max(problem.head_dim, problem.head_dim_v), _TILE_HEAD_DIMS[arch.name][-1]
    if widest <= largest:
        return None
    return f"head_dim or head_dim_v = {widest} (kernels for {arch} take up to {largest})"


def _lacking_layout(problem: AttentionProblem) -> str | None:
    if problem.varlen is not None:
        keys = problem.k.shape[0]
        if problem.varlen.page_table is not None:
            keys = problem.varlen.page_table.shape[1] * problem.k.shape[1]
        longest = max(problem.q.shape[0], keys)
    else:
        longest = max(problem.seqlen_q, problem.seqlen_kv)
    if longest >= _MAX_SEQLEN:
        return f"{longest} rows or keys one after the other (kernels take < 2**30)"
    for name, value in (("scale", problem.scale), ("softcap", problem.softcap)):
        if isinstance(value, Tensor):
            return f"{name} as a tensor on {value.device} (kernels take numbers and CPU tensors)"
    return None


def _lacking_pages(problem: AttentionProblem, arch: Arch) -> str | None:
    """Return what is lacking for a paged cache: its heads lie behind each other in the columns."""
    if not problem.is_paged:
        return None
    dims, columns = (problem.head_dim, problem.head_dim_v), _PAGED_HEAD_DIMS[arch.name]
    if not all(each in columns for each in dims):
        return f"page_table with head dims {dims} (kernels take {columns})"
    for name, cache in (("k", problem.k), ("v", problem.v)):
        width = (cache.shape[2] - 1) * cache.stride(2) + cache.shape[3]
        if width >= _MAX_SEQLEN:
            return f"page_table with heads of {name} that span {width} elements (kernels: < 2**30)"
    return None


def _lacking_blocks(problem: AttentionProblem, arch: Arch) -> str | None:
    lists = problem.block_lists
    if lists is None:
        return None
    features = ForwardFeatures(block_lists=True, full_lists=True)
    if arch.name == "sm90":
        tile_m, tile_n, *_ = sm90_tiles.forward_tile(
            tile_head_dims(problem), features, length="long"
        )
    else:
        tile_m = sm100_tiles.STREAM_ROWS
        tile_n = sm100_tiles.forward_tile(_blackwell_head_dims(problem)).tile_n
    if lists.block_q % tile_m == 0 and lists.block_kv % tile_n == 0:
        return None
    return (
        f"BLOCK_SIZE=({lists.block_q}, {lists.block_kv}) (kernels take multiples of "
        f"({tile_m}, {tile_n}))"
    )


def _lacking_mods(problem: AttentionProblem) -> str | None:
    """Return what mods compute with that kernels do not have."""
    mods = {
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "block_mask.mask_mod": problem.block_mask_mod,
    }
    for name, mod in mods.items():
        if mod is not None and _computes_in_float64(mod.graph):
            return (
                f"float64 in the {name} (kernels compute in float32: call .float() on a float64 "
                "tensor before the mod captures it, or on what the mod reads of it)"
            )
    return None


@lru_cache(maxsize=256)
def _computes_in_float64(graph: Graph) -> bool:
    """Return whether a mod has float64 that is more than something read and converted at once.

    Elements of tensors, and the Python floats that it captures, which are float64 by themselves.
    """
    nodes = graph.nodes
    wide = {number for number, node in enumerate(nodes) if node.dtype == "f64"}
    if not wide:
        return False
    if any(nodes[number].op not in ("load", "scalar") for number in wide):
        return True
    readers = (node for node in nodes if wide.intersection(node.args))
    return any(node.op != "cast" or node.dtype not in _FLOATS for node in readers)
