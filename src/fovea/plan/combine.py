"""Plan of the kernel that merges the results over parts of the keys, on any architecture.

Lives here: `CombinePlan`. Not here: how many parts there are (`tiling/split_kv.py`; a run-time
number), the merge itself (`kernels/portable/combine.py`, specified by `reference/decode.py`).
Invariant: a row is merged in an order that depends on the number of its parts alone.
"""

from dataclasses import dataclass
from typing import Literal

from fovea.plan.roles import WARP_SIZE
from fovea.tiling.split_kv import MERGED_AT_ONCE

# Rows of numbers that a part leaves beside its output: reference, sum, and the maximum if wanted.
REFERENCE, ROW_SUM, ROW_MAX = 0, 1, 2
IDLE_SUM = -1.0  # the sum of a row that belongs to no query


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinePlan:
    """The merge of one row by one CTA, whose warps take turns with the row's parts.

    `head_dim_v` counts the columns of the partial outputs: the tile's, not the tensor's. Idle rows
    belong to no query: their sum is negative in every part.
    """

    dtype: Literal["bfloat16", "float16"]
    head_dim_v: int
    sink: bool
    max_score: bool
    has_idle_rows: bool = False
    num_warps: int = 4

    def __post_init__(self) -> None:
        """Check that lanes share a row evenly."""
        assert self.head_dim_v % WARP_SIZE == 0, self.head_dim_v

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return self.num_warps * WARP_SIZE

    @property
    def parts_at_once(self) -> int:
        """Parts of a row that a warp loads together."""
        return MERGED_AT_ONCE // self.num_warps

    @property
    def columns_per_lane(self) -> int:
        """Columns of a row that a lane adds up."""
        return self.head_dim_v // WARP_SIZE

    @property
    def num_planes(self) -> int:
        """Numbers of a row that a part leaves beside its output."""
        return 3 if self.max_score else 2

    @property
    def name(self) -> str:
        """Kernel name, also in profiles."""
        kind = "bf16" if self.dtype == "bfloat16" else "f16"
        return f"fovea_combine_{kind}_d{self.head_dim_v}"
