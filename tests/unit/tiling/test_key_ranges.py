"""Ranges of keys against every position of the mask, and masks that have none."""

from typing import Any

import pytest
import torch

import fovea
from fovea import mods
from fovea.mods.trace import trace_mask_mod
from fovea.tiling import key_ranges
from fovea.tiling.exact_lists import exact_for, exactness, ranges_beside
from fovea.tiling.key_ranges import GROUP_ROWS, NOWHERE, KeyRanges

SEQLEN_Q, SEQLEN_KV = 333, 270


def _intervals(seed: int) -> Any:
    """Return a mask of any ranges, some of them empty, that differ by batch entry and head."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, SEQLEN_KV + 1, (2, 3, SEQLEN_Q, 2), generator=generator)
    begin, end = ends.amin(-1), ends.amax(-1)
    begin[:, :, 10:20] = end[:, :, 10:20]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= begin[b, h, q_idx]) & (kv_idx < end[b, h, q_idx])

    return mask


def _ids(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _causal_documents(ids: torch.Tensor) -> Any:
    return mods.document(ids)


def _documents(ids: torch.Tensor) -> Any:
    return lambda b, h, q, kv: ids[q] == ids[kv]


def _prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 77) | (kv_idx <= q_idx)


def _chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // 50 == kv_idx // 50


def _nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < -q_idx


WITH_RANGES = {
    "documents": _documents(_ids(100, 1, 63, 169)),
    "causal documents": _causal_documents(_ids(100, 1, 63, 169)),
    "prefix": _prefix,
    "chunks": _chunks,
    "nothing": _nothing,
    "any": _intervals(0),
}


def _dense(mask: Any, batch: int, heads: int) -> torch.Tensor:
    axes = (batch, heads, SEQLEN_Q, SEQLEN_KV)
    b, h, q, kv = (
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(axes)
    )
    return mask(b, h, q, kv).expand(axes)


def _found(mask: Any, *, batch: int | None = None, heads: int | None = None, **sizes: Any) -> Any:
    block_mask = fovea.create_block_mask(mask, batch, heads, SEQLEN_Q, SEQLEN_KV, "cpu", **sizes)
    found = key_ranges_of(block_mask)
    return block_mask, found


def key_ranges_of(block_mask: Any) -> KeyRanges | None:
    """Return what was recorded beside a mask that fovea made."""
    from fovea.problem.block_masks import known_lists

    exact = exactness(known_lists(block_mask))
    assert exact is not None
    return exact.ranges


@pytest.mark.parametrize("block_size", [128, (64, 32), (100, 7)])
@pytest.mark.parametrize("name", WITH_RANGES)
def test_ranges_show_what_the_mask_shows(name: str, block_size: Any) -> None:
    sizes = {"batch": 2, "heads": 3} if name == "any" else {}
    _, found = _found(WITH_RANGES[name], BLOCK_SIZE=block_size, **sizes)
    assert found is not None
    begin, end = found.rows.unbind(-1)
    keys = torch.arange(SEQLEN_KV)
    shown = (keys >= begin[..., None]) & (keys < end[..., None])
    assert torch.equal(shown, _dense(WITH_RANGES[name], *shown.shape[:2]))
    assert torch.equal(begin == NOWHERE, ~shown.any(-1))


@pytest.mark.parametrize("name", WITH_RANGES)
def test_groups_bound_their_rows(name: str) -> None:
    sizes = {"batch": 2, "heads": 3} if name == "any" else {}
    _, found = _found(WITH_RANGES[name], **sizes)
    begin, end = found.rows.unbind(-1)
    for group, bounds in enumerate(found.groups.unbind(2)):
        rows = slice(group * GROUP_ROWS, (group + 1) * GROUP_ROWS)
        mine = begin[:, :, rows], end[:, :, rows]
        expected = (mine[0].amin(2), mine[1].amax(2), mine[0].amax(2), mine[1].amin(2))
        assert torch.equal(bounds, torch.stack(expected, -1))


def test_orders_put_the_tile_with_most_keys_first() -> None:
    _, found = _found(mods.document(_ids(100, 1, 63, 169)))
    # Unions of 64 rows: 64, 128, 91, 92, 106 and 106 keys.
    assert found.orders[0].tolist() == [1, 4, 5, 3, 2, 0]
    assert [order.numel() for order in found.orders] == [6, 3, 2, 2]
    assert all(sorted(order.tolist()) == list(range(order.numel())) for order in found.orders)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, kv: (kv < 4) | (q - kv <= 9) & (q >= kv),  # sinks and a window
        lambda b, h, q, kv: (q - kv) % 2 == 0,
        lambda b, h, q, kv: (q < 130) | (kv >= 128) | (kv < 2),  # several ranges across blocks
        _documents(_ids(100, 1, 63, 169) % 2),
    ],
)
def test_mask_with_several_ranges_in_a_row_has_none(mask: Any) -> None:
    assert _found(mask)[1] is None


def test_many_partial_blocks_on_a_cpu_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ranges, "_MOST_POSITIONS_CPU", 128 * 128)
    assert _found(_chunks)[1] is None


def test_captured_tensor_that_changed_makes_lists_inexact() -> None:
    ids = _ids(100, 1, 63, 169)
    mask = mods.document(ids)
    block_mask, found = _found(mask)
    from fovea.problem.block_masks import known_lists

    lists, traced = known_lists(block_mask), trace_mask_mod(mask, None)
    assert exact_for(lists, traced) is not None
    assert ranges_beside(block_mask.kv_num_blocks) is found
    ids[5] = 3
    assert exact_for(lists, traced) is None


def test_another_tensor_of_equal_contents_makes_lists_inexact() -> None:
    from fovea.problem.block_masks import known_lists

    block_mask, _ = _found(mods.document(_ids(100, 1, 63, 169)))
    other = trace_mask_mod(mods.document(_ids(100, 1, 63, 169)), None)
    assert exact_for(known_lists(block_mask), other) is None
