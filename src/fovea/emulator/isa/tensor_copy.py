"""Tensor copies: cp.async.bulk.tensor, its reduction and prefetch, and tensor-map instructions.

What lives here: the forms. Not here: moving tiles (`isa/copy_engine.py`), bulk copies without a
tensor map and commit groups (`isa/bulk_copy.py`).

Invariant: a load writes a CTA's shared memory and then signals exactly the box's bytes there,
out-of-bounds elements included; a store reads all of shared memory before it writes any of global.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fovea.emulator.arithmetic.reduction import check_reduction, reduce_elements
from fovea.emulator.async_engine import Effect, Operation
from fovea.emulator.errors import IllegalOperand, OutOfBounds
from fovea.emulator.isa import bulk_copy as bulk_copy  # registers its forms
from fovea.emulator.isa import instruction
from fovea.emulator.isa import store_async as store_async  # registers its forms
from fovea.emulator.isa.copy_engine import (
    SharedPlace,
    TileCopy,
    active_lanes,
    add_to_bulk_groups,
    barrier_channel,
    bulk_channel,
    complete_bytes,
    issues,
    multicast_ranks,
    own_shared_place,
    shared_place,
    start,
    tensor_map_at,
    tile_copy,
)
from fovea.emulator.isa.instruction import Array, Instruction
from fovea.emulator.isa.row_copy import RowsCopy, rows_copy
from fovea.emulator.layout.descriptor import CHUNK_BYTES
from fovea.emulator.layout.tensor_map import MAP_BYTES, replace_field
from fovea.emulator.layout.tensor_tile import loaded_tile
from fovea.emulator.memory_order import GPU

_SOURCE = "PTX ISA 9.7.9.27"
_DIMENSIONS = "1d 2d 3d 4d 5d"
_ROWS_TARGETS = "sm_100a,sm_100f,sm_103a,sm_103f,sm_110a"
_ALIGNMENT = 128


def _read_coordinates(i: Instruction) -> Callable[[Any], list[Array]]:
    count = 5 if i["rows"] else int(i["dim"][0])
    if len(i.items("tensorCoords")) != count:
        raise i.error(
            f"{len(i.items('tensorCoords'))} coordinates for .{i['dim']} (it takes {count})"
        )
    return i.read_vector("tensorCoords", "s32")


def _read_policy(i: Instruction) -> Callable[[Any], object]:
    """Return a reader of the cache policy: a hint without effect, but it must be initialised."""
    if not i.has("cache-policy"):
        return lambda warp: None
    return i.read("cache-policy", "b64")


class _TileReader:
    """Reads the operands that name a box: tensor map and coordinates."""

    def __init__(self, i: Instruction):
        self._instruction = i
        self._map_address = i.address("tensorMap")
        self._coordinates = _read_coordinates(i)

    def operands(self, warp: Any) -> list[Array]:
        """Return the operands' lanes."""
        return [self._map_address(warp), *self._coordinates(warp)]

    def copy(
        self, warp: Any, mask: Array, operands: Sequence[Array], lane: int
    ) -> TileCopy | RowsCopy:
        """Return the box, or the four rows, that one lane names."""
        i = self._instruction
        tensor = tensor_map_at(i, warp, lane, int(operands[0][lane]), mask)
        coordinates = tuple(int(lanes[lane]) for lanes in operands[1:])
        start = coordinates[0] * tensor.element.size_bytes // tensor.pack
        if start % CHUNK_BYTES:
            raise IllegalOperand(
                f"the box begins {start} bytes along dimension 0 (coordinate {coordinates[0]}); "
                "it must be a multiple of 16: elsewhere the hardware reports an illegal "
                "instruction",
                warp.where(i, lane=lane),
            )
        if i["rows"]:
            return rows_copy(i, warp, lane, tensor, coordinates)
        return tile_copy(i, warp, lane, tensor, coordinates)


@instruction(
    "cp.async.bulk.tensor.dim.shared::cta.global{.tile}.mbarrier::complete_tx::bytes{.group}"
    "{.L2::cache_hint}{.group} [d], [tensorMap, tensorCoords], [mbar]{, cache-policy}",
    "cp.async.bulk.tensor.dim.shared::cluster.global{.tile}.mbarrier::complete_tx::bytes"
    "{.multicast::cluster}{.group}{.L2::cache_hint}{.group} [d], [tensorMap, tensorCoords], [mbar]"
    "{, ctaMask}{, cache-policy}",
    source=f"{_SOURCE}.1.2",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    dim=_DIMENSIONS,
    group="cta_group::1 cta_group::2",
)
@instruction(
    "cp.async.bulk.tensor.dim.shared::cta.global.rows.mbarrier::complete_tx::bytes{.group}"
    "{.L2::cache_hint}{.group} [d], [tensorMap, tensorCoords], [mbar]{, cache-policy}",
    "cp.async.bulk.tensor.dim.shared::cluster.global.rows.mbarrier::complete_tx::bytes"
    "{.multicast::cluster}{.group}{.L2::cache_hint}{.group} [d], [tensorMap, tensorCoords], [mbar]"
    "{, ctaMask}{, cache-policy}",
    source=f"{_SOURCE}.1.2",
    evidence="manual-only",
    targets=_ROWS_TARGETS,
    kind="copy",
    dim="2d",
    rows="tile::gather4",
    group="cta_group::1 cta_group::2",
)
def cp_async_bulk_tensor_load(i: Instruction) -> Any:
    """Copy a box of a tensor to shared memory and signal its bytes at an mbarrier."""
    tiles, read_policy = _TileReader(i), _read_policy(i)
    target, barrier = i.address("d"), i.address("mbar")
    read_mask = i.read("ctaMask", "u16") if i.has("ctaMask") else None
    place_of = own_shared_place if i.has("shared::cta") else shared_place
    is_pair = i["group"] == "cta_group::2"

    def run(warp: Any, mask: Array) -> None:
        read_policy(warp)
        operands = tiles.operands(warp)
        targets, barriers = target(warp), barrier(warp)
        ctas = None if read_mask is None else read_mask(warp)
        for lane, *_ in issues(mask, targets, barriers, ctas, *operands):
            copy = tiles.copy(warp, mask, operands, lane)
            _check_base(i, warp, lane, copy)
            to = place_of(
                i, warp, lane, int(targets[lane]), alignment=_ALIGNMENT, what="destination"
            )
            mbar = shared_place(i, warp, lane, int(barriers[lane]), alignment=8, what="mbarrier")
            _check_barrier_place(i, warp, lane, to, mbar, is_pair=is_pair)
            pairs = [(to, mbar)]
            if ctas is not None:
                ranks = multicast_ranks(i, warp, lane, int(ctas[lane]))
                pairs = [
                    (to.in_cta(rank), mbar.in_cta(_barrier_rank(rank, mbar, is_pair=is_pair)))
                    for rank in ranks
                ]
            size = copy.tensor.box_bytes
            warp.machine.counters.add("tensor_load_bytes", size)
            channel = barrier_channel([place for _, place in pairs])
            effects = [_load_effect(copy, *pair) for pair in pairs]
            start(warp, i, effects, kind="tensor load", channel=channel)

    return run


def _check_base(i: Instruction, warp: Any, lane: int, copy: TileCopy | RowsCopy) -> None:
    """Report a load through a map whose base lies in no memory, wherever its box does.

    An H200 answers with error 700 where no memory is mapped at the base; stores do not mind
    (docs/notes/emulator_on_silicon.md).
    """
    base = copy.tensor.address
    if warp.machine.memory.find(base) is None:
        raise OutOfBounds(
            f"a load through a tensor map whose base {base:#x} is in no allocation; "
            f"{warp.machine.memory.nearest(base)}",
            warp.where(i, lane=lane, address=base, space="global"),
        )


def _barrier_rank(rank: int, mbar: SharedPlace, *, is_pair: bool) -> int:
    """Return the CTA whose barrier a multicast destination signals: its own, or of its pair."""
    return rank & ~1 | mbar.cta.rank & 1 if is_pair else rank


def _check_barrier_place(
    i: Instruction, warp: Any, lane: int, to: SharedPlace, mbar: SharedPlace, *, is_pair: bool
) -> None:
    if mbar.cta is to.cta or (is_pair and mbar.cta.rank ^ 1 == to.cta.rank):
        return
    raise IllegalOperand(
        f"the mbarrier is in CTA {mbar.cta.rank} of the cluster and the destination in CTA "
        f"{to.cta.rank}; without .cta_group::2 they must be in one CTA, with it in one pair",
        warp.where(i, lane=lane),
    )


def _load_effect(copy: TileCopy | RowsCopy, to: SharedPlace, mbar: SharedPlace) -> Effect:
    def effect(operation: Operation) -> None:
        copy.check_read(operation.access)
        offsets = copy.shared_offsets(to.offset)
        box = _loaded(copy).reshape(*offsets.shape, CHUNK_BYTES)
        to.cta.shared.write_at(offsets, box, CHUNK_BYTES, operation.access)
        complete_bytes(mbar, copy.tensor.box_bytes, operation)

    return effect


def _loaded(copy: TileCopy | RowsCopy) -> Array:
    """Return the bytes that a load puts in shared memory."""
    if isinstance(copy, RowsCopy):
        return np.concatenate([_loaded(row) for row in copy.rows])
    return loaded_tile(copy.tensor, copy.tile, copy.view)


@instruction(
    "cp.async.bulk.tensor.dim.global.shared::cta{.tile}.bulk_group{.L2::cache_hint} "
    "[tensorMap, tensorCoords], [a]{, cache-policy}",
    source=f"{_SOURCE}.1.2",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    dim=_DIMENSIONS,
)
@instruction(
    "cp.async.bulk.tensor.dim.global.shared::cta.rows.bulk_group{.L2::cache_hint} "
    "[tensorMap, tensorCoords], [a]{, cache-policy}",
    source=f"{_SOURCE}.1.2",
    evidence="manual-only",
    targets=_ROWS_TARGETS,
    kind="copy",
    dim="2d",
    rows="tile::scatter4",
)
def cp_async_bulk_tensor_store(i: Instruction) -> Any:
    """Copy a box from shared memory to the part of a tensor inside its bounds."""
    return _store(i, None)


@instruction(
    "cp.reduce.async.bulk.tensor.dim.global.shared::cta.op{.tile}.bulk_group{.L2::cache_hint} "
    "[tensorMap, tensorCoords], [a]{, cache-policy}",
    source=f"{_SOURCE}.1.3",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    dim=_DIMENSIONS,
    op="add min max inc dec and or xor",
)
def cp_reduce_async_bulk_tensor(i: Instruction) -> Any:
    """Reduce a box in shared memory into the part of a tensor inside its bounds."""
    return _store(i, i["op"])


def _store(i: Instruction, reduction: str | None) -> Any:
    tiles, read_policy, source = _TileReader(i), _read_policy(i), i.address("a")
    kind = "tensor store" if reduction is None else f"tensor reduce {reduction}"

    def run(warp: Any, mask: Array) -> None:
        read_policy(warp)
        operands, sources = tiles.operands(warp), source(warp)
        for lanes in issues(mask, sources, *operands):
            lane = lanes[0]
            copy = tiles.copy(warp, mask, operands, lane)
            if reduction is not None:
                try:
                    check_reduction(reduction, copy.tensor.element.name)
                except ValueError as error:
                    raise IllegalOperand(str(error), warp.where(i, lane=lane)) from error
            place = own_shared_place(
                i, warp, lane, int(sources[lane]), alignment=_ALIGNMENT, what="source"
            )
            warp.machine.counters.add("tensor_store_bytes", copy.tensor.box_bytes)
            operation = start(
                warp,
                i,
                _store_effects(copy, place, reduction),
                kind=kind,
                channel=bulk_channel(warp, lane),
            )
            operation.read_effects = 1
            add_to_bulk_groups(warp, lanes, operation)

    return run


def _store_effects(
    copy: TileCopy | RowsCopy, place: SharedPlace, reduction: str | None
) -> Sequence[Effect]:
    read: list[Array] = []

    def read_shared(operation: Operation) -> None:
        offsets = copy.shared_offsets(place.offset)
        chunks = place.cta.shared.read_at(offsets, CHUNK_BYTES, operation.access)
        counts = copy.tensor.box_counts
        read.append(chunks.reshape(*reversed(counts[1:]), -1))

    def write_global(operation: Operation) -> None:
        if isinstance(copy, TileCopy):
            _write_box(copy, read[0], reduction, operation)
            return
        for row, data in zip(copy.rows, read[0]):
            _write_box(row, data[None], reduction, operation)

    return [read_shared, write_global]


def _write_box(copy: TileCopy, box: Array, reduction: str | None, operation: Operation) -> None:
    """Write the part of a box of bytes that is inside the tensor, or reduce it into it."""
    if copy.view is None:
        return
    new = copy.inside_of(box)
    if reduction is not None:
        element = copy.tensor.element.name
        new = reduce_elements(
            reduction, element, np.ascontiguousarray(copy.view), np.ascontiguousarray(new)
        )
    if copy.segment is not None and copy.segment.is_read_only:
        access = operation.access
        raise OutOfBounds(copy.segment.read_only_text, access.warp.where(access.instruction))
    access = operation.written or operation.access
    access.strength = 0 if reduction is None else GPU + 1  # atomic: two of them are no race
    copy.write_global(new.reshape(copy.view.shape), access)


@instruction(
    "cp.async.bulk.prefetch.tensor.dim.L2.global{.tile}{.L2::cache_hint} "
    "[tensorMap, tensorCoords]{, cache-policy}",
    source=f"{_SOURCE}.1.4",
    targets="sm_90+",
    evidence="manual-only",
    kind="copy",
    dim=_DIMENSIONS,
)
@instruction(
    "cp.async.bulk.prefetch.tensor.dim.L2.global.rows{.L2::cache_hint} "
    "[tensorMap, tensorCoords]{, cache-policy}",
    source=f"{_SOURCE}.1.4",
    evidence="manual-only",
    targets=_ROWS_TARGETS,
    kind="copy",
    dim="2d",
    rows="tile::gather4",
)
def cp_async_bulk_prefetch_tensor(i: Instruction) -> Any:
    """Check the operands of a prefetch of a box to L2; it has no other effect."""
    tiles, read_policy = _TileReader(i), _read_policy(i)

    def run(warp: Any, mask: Array) -> None:
        read_policy(warp)
        operands = tiles.operands(warp)
        for lane, *_ in issues(mask, *operands):
            tiles.copy(warp, mask, operands, lane)

    return run


@instruction(
    "prefetch{.space}.tensormap [a]",
    source="PTX ISA 9.7.9.16",
    evidence="manual-only",
    kind="copy",
    space="const param",
)
def prefetch_tensormap(i: Instruction) -> Any:
    """Check that the address of a tensor map to be prefetched holds one."""
    address = i.address("a")

    def run(warp: Any, mask: Array) -> None:
        for lane in active_lanes(mask):
            tensor_map_at(i, warp, lane, int(address(warp)[lane]), mask)

    return run


# --- tensormap.replace --------------------------------------------------------------------------

_PLAIN_FIELDS = "global_address rank elemtype interleave_layout swizzle_mode fill_mode"
_ORDINAL_FIELDS = "box_dim global_dim global_stride element_stride"


@instruction(
    "tensormap.replace.tile.field{.space}.b1024.type [a], new_val",
    source="PTX ISA 9.7.9.28",
    evidence="manual-only",
    targets="sm_90a,sm_100a,sm_100f,sm_103a,sm_103f,sm_110a,sm_120a",
    kind="memory",
    field=_PLAIN_FIELDS,
    space="global shared::cta",
    type="b32 b64",
)
@instruction(
    "tensormap.replace.tile.field{.space}.b1024.type [a], ord, new_val",
    source="PTX ISA 9.7.9.28",
    evidence="manual-only",
    targets="sm_90a,sm_100a,sm_100f,sm_103a,sm_103f,sm_110a,sm_120a",
    kind="memory",
    field=_ORDINAL_FIELDS,
    space="global shared::cta",
    type="b32 b64",
)
def tensormap_replace(i: Instruction) -> Any:
    """Replace one field of a tensor map in memory."""
    field = i["field"]
    wanted = "b64" if field in ("global_address", "global_stride") else "b32"
    if i["type"] != wanted:
        raise i.error(f".{field} takes .{wanted}")
    ordinal = i.immediate("ord") if i.has("ord") else 0
    address, read_value = i.address("a"), i.read("new_val", wanted)
    is_shared = i["space"] == "shared::cta"

    def run(warp: Any, mask: Array) -> None:
        access = warp.touch(i, mask)
        for lane in active_lanes(mask):
            at = int(address(warp)[lane])
            where = warp.where(i, lane=lane, address=at)
            if is_shared:
                place = own_shared_place(i, warp, lane, at, alignment=64, what="tensor map")
                segment, offset = place.cta.shared, place.offset
            else:
                found = warp.machine.segment(warp, at)
                if found is None:
                    raise OutOfBounds("nothing lies at the tensor map's address", where)
                if found[0].is_read_only:
                    raise OutOfBounds(found[0].read_only_text, where)
                segment, offset = found
            data = segment.read(offset, MAP_BYTES, access).tobytes()
            try:
                data = replace_field(data, field, int(read_value(warp)[lane]), ordinal)
            except ValueError as error:
                raise IllegalOperand(str(error), where) from error
            segment.write(offset, np.frombuffer(data, np.uint8), access)

    return run


@instruction(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.scope.sync.aligned "
    "[d], [a], size",
    source="PTX ISA 9.7.13.16",
    evidence="manual-only",
    kind="memory",
    scope="cta cluster gpu sys",
)
def tensormap_cp_fenceproxy(i: Instruction) -> Any:
    """Copy a tensor map from shared to global memory and fence it for the tensormap proxy."""
    if i.immediate("size") != MAP_BYTES:
        raise i.error(f"size is {i.immediate('size')}; allowed: {MAP_BYTES}")
    target, source = i.address("d"), i.address("a")

    def run(warp: Any, mask: Array) -> None:
        lane = active_lanes(mask)[0]
        access = warp.touch(i, mask)
        place = own_shared_place(
            i, warp, lane, int(source(warp)[lane]), alignment=_ALIGNMENT, what="source"
        )
        at = int(target(warp)[lane])
        found = warp.machine.segment(warp, at)
        if found is None:
            raise OutOfBounds(
                "nothing lies at the destination", warp.where(i, lane=lane, address=at)
            )
        data = place.cta.shared.read(place.offset, MAP_BYTES, access)
        found[0].write(found[1], data, access)

    return run
