"""Regions of Blackwell's tensor memory, and the check that they share columns only by intent.

Lives here: `TensorRegion`. Not here: which regions a kernel has (`sm100.py`). Invariant: a region
that lies in another one names it.
"""

import itertools
from dataclasses import dataclass

TENSOR_COLUMNS = 512  # 32-bit columns of tensor memory, all taken: one CTA an SM


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRegion:
    """Columns of tensor memory; with `aliases` they are part of another region, by intent."""

    name: str
    first: int
    columns: int
    aliases: str = ""

    @property
    def end(self) -> int:
        """The column past the last."""
        return self.first + self.columns


def check_regions(regions: tuple[TensorRegion, ...]) -> None:
    """Check that regions of tensor memory lie inside it, and overlap only where they say so.

    Raises:
        AssertionError: they do not.
    """
    named = {region.name: region for region in regions}
    for region in regions:
        assert region.first >= 0 and region.end <= TENSOR_COLUMNS, region
        if region.aliases:
            whole = named[region.aliases]
            assert whole.first <= region.first and region.end <= whole.end, region
    own = sorted((r for r in regions if not r.aliases), key=lambda region: region.first)
    for before, after in itertools.pairwise(own):
        assert before.end <= after.first, (before, after)
