"""Which active warp runs next: in schedules of uneven pace one warpgroup falls behind.

Lives here: the choice among warps that can run. Not here: who can (`schedule.py`). Invariant: every
warp that can run runs some time, so each choice is a legal schedule; with even seeds all are alike.

Among random schedules of even pace hardly one lets a ring be filled again before a warpgroup has
looked at what was there. Odd seeds in a row slow each warpgroup of the CTAs, more and less.
"""

from collections.abc import Callable, Sequence

from fovea.emulator.machine.warp import Warp

_GROUP_WARPS = 4  # of a warpgroup
_PACES = (1 / 32, 1 / 512)  # of the slow warpgroup's turns those that it takes


class Pace:
    """Chooses among active warps."""

    def __init__(self, seed: int, num_warps: int, random: Callable[[], float]):
        """Choose the warpgroup of each CTA of `num_warps` warps that falls behind, if one does."""
        self._random = random
        self._slow: int | None = None
        self._taken = 1.0
        groups = -(-num_warps // _GROUP_WARPS)
        if seed % 2 and groups > 1:
            turn, self._slow = divmod(seed // 2, groups)
            self._taken = _PACES[turn % len(_PACES)]

    def next(self, active: Sequence[Warp]) -> int:
        """Return the place of the warp that runs next."""
        position = int(self._random() * len(active))
        if self._slow is None or not self._is_slow(active[position]):
            return position
        if self._random() >= self._taken:
            others = [place for place, warp in enumerate(active) if not self._is_slow(warp)]
            if others:
                return others[int(self._random() * len(others))]
        return position

    def _is_slow(self, warp: Warp) -> bool:
        return warp.index // _GROUP_WARPS == self._slow
