"""Tensor maps: the 128 bytes that describe a tensor to the copy engine.

What lives here: decoding, encoding and field replacement of the hardware's tiled tensor map. Not
here: which bytes a copy moves (tensor_tile.py) or when (isa/tensor_copy.py).

Invariant: a `TensorMap` that decodes without an error describes a copy the engine accepts: rank,
element type, box, strides and swizzle fit each other.

The layout below (little-endian 32-bit words) was read off maps packed by CuTe-DSL host launchers
for varied shapes, strides, boxes, types and swizzles; entries marked * could not be varied there
and are inferred from the order of the driver's arguments:
    0-1    global address
    2      bits 4-6 rank - 1; 7-10 element type; 11-12 interleave*; 13-14 swizzle; 15 NaN fill*;
           16 round f32 to tf32; 17-18 L2 promotion; 21 set when the tensor spans 128 KiB or more
    3-6    strides of dimensions 1-4, in units of 16 bytes, low 32 bits
    7      their bits 32-35, four bits each
    8-12   sizes of dimensions 0-4, minus 1
    13     bits 0-14 element strides minus 1, three bits each*; bits 24-31 box size of dimension 0,
    minus 1 14     box sizes of dimensions 1-4, minus 1, a byte each
    15-31  not read

Source: see above; numbering of types: PTX ISA, tensormap.replace.
"""

import struct
from dataclasses import dataclass, replace

from fovea.emulator.arguments import check_kind, integers, wrong

MAP_BYTES = 128
# Low nibble of word 2: 2 in maps packed by launchers, 0 in maps that kernels build from zeroed
# memory with tensormap.replace.
_TILED_TAG = 2
_TILED_TAGS = (0, _TILED_TAG)
_LARGE_TENSOR_BYTES = 128 * 1024
_TF32, _TF32_FTZ, _PACKED_4_BIT = 11, 12, 13  # their numbers for tensormap.replace
_PACKED_4_BIT_CODE = 11  # in the map, where tf32 is f32 with a flag (read off a launcher's map)
_SWIZZLE_WIDTHS = (0, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of tensor maps: its number, name and size."""

    number: int
    name: str
    size_bytes: int


ELEMENT_TYPES: tuple[ElementType, ...] = tuple(
    ElementType(number, name, size)
    for number, (name, size) in enumerate(
        (
            ("u8", 1),
            ("u16", 2),
            ("u32", 4),
            ("s32", 4),
            ("u64", 8),
            ("s64", 8),
            ("f16", 2),
            ("f32", 4),
            ("f32.ftz", 4),
            ("f64", 8),
            ("bf16", 2),
            ("tf32", 4),
            ("tf32.ftz", 4),
            ("b4x16", 1),  # two elements of 4 bits in a byte: a unit here is a byte
        )
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A decoded tiled tensor map. Dimension 0 is the contiguous one.

    Units: strides in bytes (dimension 0's is the element size), box and sizes in elements; of
    packed 4-bit elements, sizes and box of dimension 0 are in bytes.
    """

    address: int
    element: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fills_nan: bool = False
    l2_promotion: int = 2

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        if not 1 <= rank <= 5:
            raise ValueError(f"tensor map has rank {rank}; allowed: 1 to 5")
        if not len(self.strides) == len(self.box) == len(self.element_strides) == rank:
            raise ValueError(f"tensor map of rank {rank} has fields of another rank: {self}")
        if self.address % 16:
            raise ValueError(f"tensor map address {self.address:#x} is no multiple of 16")
        for i, size in enumerate(self.box):
            if not 1 <= size <= 256:
                raise ValueError(f"tensor map box size {size} of dimension {i} is not in 1..256")
        for i, stride in enumerate(self.strides[1:], 1):
            if stride % 16 or not 0 <= stride < 1 << 40:
                raise ValueError(
                    f"tensor map stride {stride} of dimension {i} is no multiple of 16 below 2^40"
                )
        for i, stride in enumerate(self.element_strides):
            if not 1 <= stride <= 8:
                raise ValueError(f"tensor map element stride {stride} of dimension {i} is not 1..8")
        if self.swizzle not in _SWIZZLE_WIDTHS:
            raise ValueError(f"tensor map swizzle {self.swizzle} is not one of {_SWIZZLE_WIDTHS}")
        inner = self.box[0] * self.element.size_bytes
        if inner % 16:
            raise ValueError(
                f"tensor map box covers {inner} bytes of dimension 0; it must be a multiple of 16"
            )
        if self.swizzle and inner > self.swizzle:
            raise ValueError(
                f"tensor map box covers {inner} bytes of dimension 0, more than the swizzle's "
                f"{self.swizzle}"
            )

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def pack(self) -> int:
        """Elements in one unit of dimension 0: coordinates are in elements."""
        return 2 if self.element.number == _PACKED_4_BIT else 1

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides that count: dimension 0 has none (driver API, cuTensorMapEncodeTiled)."""
        return (1, *self.element_strides[1:])

    @property
    def box_counts(self) -> tuple[int, ...]:
        """Elements a copy moves along each dimension: the box sampled at the element strides."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes one copy moves."""
        total = self.element.size_bytes
        for count in self.box_counts:
            total *= count
        return total


def decode_tensor_map(data: bytes) -> TensorMap:
    """Return the fields of a 128-byte tensor map.

    Raises:
        ValueError: when the bytes are no tiled tensor map or its fields do not fit each other.
    """
    if len(data) != MAP_BYTES:
        raise ValueError(f"a tensor map has {MAP_BYTES} bytes, got {len(data)}")
    word = struct.unpack("<32I", data)
    flags = word[2]
    if flags & 0xF not in _TILED_TAGS:
        raise ValueError(
            f"tensor map tag is {flags & 0xF}, tiled maps have {_TILED_TAGS}; im2col maps are not "
            "implemented, and other bytes are no tensor map (is the address right?)"
        )
    rank = (flags >> 4 & 7) + 1
    number = flags >> 7 & 0xF
    if number > _PACKED_4_BIT_CODE:
        raise ValueError(
            f"tensor map element type {number} is not implemented (known: 0 to "
            f"{_PACKED_4_BIT_CODE}; 12 and 13 pad packed 4- and 6-bit elements in shared memory)"
        )
    if flags >> 11 & 3:
        raise ValueError("interleaved tensor maps are not implemented; use interleave none")
    element = ELEMENT_TYPES[_PACKED_4_BIT if number == _PACKED_4_BIT_CODE else number]
    if flags >> 16 & 1:
        element = ELEMENT_TYPES[_TF32_FTZ if number == _code_of(_TF32_FTZ) else _TF32]
    if rank > 5:
        raise ValueError(f"tensor map has rank {rank}; allowed: 1 to 5")
    strides = [(word[3 + i] | (word[7] >> 4 * i & 0xF) << 32) * 16 for i in range(rank - 1)]
    boxes = (word[13] >> 24, *struct.unpack("<4B", struct.pack("<I", word[14])))
    sizes = [word[8 + i] + 1 for i in range(rank)]
    box = [size + 1 for size in boxes[:rank]]
    if element.number == _PACKED_4_BIT:
        if sizes[0] % 2 or box[0] % 2:
            raise ValueError(
                f"tensor map of packed 4-bit elements has size {sizes[0]} and box {box[0]} of "
                "dimension 0; both must be even"
            )
        sizes[0], box[0] = sizes[0] // 2, box[0] // 2
    return TensorMap(
        address=word[0] | word[1] << 32,
        element=element,
        sizes=tuple(sizes),
        strides=(element.size_bytes, *strides),
        box=tuple(box),
        element_strides=tuple((word[13] >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=_SWIZZLE_WIDTHS[flags >> 13 & 3],
        fills_nan=bool(flags >> 15 & 1),
        l2_promotion=flags >> 17 & 3,
    )


def encode_tensor_map(tensor: TensorMap) -> bytes:
    """Return the 128 bytes of a tensor map, as a launcher packs them."""
    check_kind("tensor", tensor, TensorMap, "a TensorMap", "make one with make_tensor_map")
    rank = tensor.rank
    span = max(n * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    number = tensor.element.number
    is_tf32 = number in (_TF32, _TF32_FTZ)
    flags = (
        _TILED_TAG
        | (rank - 1) << 4
        | _code_of(number) << 7
        | _SWIZZLE_WIDTHS.index(tensor.swizzle) << 13
        | int(tensor.fills_nan) << 15
        | int(is_tf32) << 16
        | tensor.l2_promotion << 17
        | int(span >= _LARGE_TENSOR_BYTES) << 21
    )
    units = [stride // 16 for stride in tensor.strides[1:]]
    units += [0] * (4 - len(units))
    boxes = [size - 1 for size in tensor.box] + [0] * (5 - rank)
    boxes[0] = tensor.box[0] * tensor.pack - 1
    sampling = sum((stride - 1) << 3 * i for i, stride in enumerate(tensor.element_strides))
    words = [
        tensor.address & 0xFFFFFFFF,
        tensor.address >> 32,
        flags,
        *[unit & 0xFFFFFFFF for unit in units],
        sum((unit >> 32) << 4 * i for i, unit in enumerate(units)),
        tensor.sizes[0] * tensor.pack - 1,
        *[size - 1 for size in tensor.sizes[1:]],
        *[0] * (5 - rank),
        sampling | boxes[0] << 24,
        boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24,
    ]
    return struct.pack("<15I", *words).ljust(MAP_BYTES, b"\0")


def _code_of(number: int) -> int:
    """Return the type a map holds for a number of tensormap.replace."""
    if number == _PACKED_4_BIT:
        return _PACKED_4_BIT_CODE
    return number - 4 if number in (_TF32, _TF32_FTZ) else number


def make_tensor_map(
    address: int,
    element: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    element_strides: tuple[int, ...] | None = None,
    fills_nan: bool = False,
) -> TensorMap:
    """Return a tensor map from the driver's arguments.

    Args:
        address: global address of the tensor.
        element: name of the element type, e.g. "bf16".
        sizes: elements per dimension, contiguous dimension first.
        strides: bytes between consecutive elements of dimensions 1 and up.
        box: elements a copy covers per dimension.
        swizzle: 0, 32, 64 or 128.
        element_strides: traversal stride per dimension; 1 if not given.
        fills_nan: whether elements out of bounds read as NaN instead of zero.

    Raises:
        LaunchError: an argument of the wrong kind or number of dimensions, or a map that no driver
            makes.
    """
    kinds = {kind.name: kind for kind in ELEMENT_TYPES}
    if not isinstance(element, str) or element not in kinds:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong("element", element, ", ".join(kinds), "name the type of the elements")
    check_kind("address", address, int, "an int", "address = memory.register(array, name)")
    check_kind("swizzle", swizzle, int, "0, 32, 64 or 128", "give the bytes as an int")
    check_kind("fills_nan", fills_nan, bool, "True or False", "leave it out for zeros")
    if not 0 <= address < 1 << 64 or address % 16:
        remedy = "align the tensor to 16 bytes: memory.register returns the address it has"
        raise wrong("address", address, "a multiple of 16 below 2^64", remedy)
    if swizzle not in _SWIZZLE_WIDTHS:
        remedy = "choose the width the kernel's layout of shared memory has"
        raise wrong("swizzle", swizzle, "0, 32, 64, 128", remedy)
    shapes = _shapes(sizes, strides, box, element_strides)
    for stride in shapes[1]:
        if stride % 16:
            allowed = "multiples of 16 bytes, as the copy engine needs"
            raise wrong("strides", strides, allowed, "pad the rows of the tensor")
    _check_rows(shapes[2][0], kinds[element], swizzle, box)
    return TensorMap(
        address=address,
        element=kinds[element],
        sizes=shapes[0],
        strides=(kinds[element].size_bytes, *shapes[1]),
        box=shapes[2],
        element_strides=shapes[3],
        swizzle=swizzle,
        fills_nan=fills_nan,
    )


def _check_rows(count: int, element: ElementType, swizzle: int, box: object) -> None:
    """Raise LaunchError unless rows of a box are made of units of 16 bytes and fit the swizzle."""
    row = count * element.size_bytes
    unit = 16 // element.size_bytes
    most = f" up to {swizzle // element.size_bytes}" if swizzle else ""
    if row % 16 or (swizzle and row > swizzle):
        allowed = (
            f"box[0] a multiple of {unit}{most} elements of .{element.name}: rows of whole 16 "
            f"bytes{f', no wider than swizzle={swizzle}' if swizzle else ''}"
        )
        remedy = "copy more, or less, of dimension 0"
        if swizzle and row > swizzle:
            remedy = "copy a part of dimension 0 at a time, or choose a wider swizzle"
        raise wrong("box", box, allowed, remedy)


def _shapes(
    sizes: object, strides: object, box: object, element_strides: object
) -> list[tuple[int, ...]]:
    """Return the shapes of a map as tuples, each of its number of dimensions and in its range."""
    remedy = "count from the contiguous dimension; strides are in bytes, without that dimension's"
    extents = integers("sizes", sizes, "1 to 5 ints", remedy)
    rank = len(extents)
    if element_strides is None:
        element_strides = (1,) * rank
    found: list[tuple[int, ...]] = []
    for name, value, count, low, high in (
        ("sizes", sizes, min(max(rank, 1), 5), 1, 1 << 32),
        ("strides", strides, rank - 1, 0, (1 << 40) - 1),
        ("box", box, rank, 1, 256),
        ("element_strides", element_strides, rank, 1, 8),
    ):
        allowed = f"{count} ints of {low} to {high} (sizes has {rank})"
        numbers = integers(name, value, allowed, remedy)
        if len(numbers) != count or any(not low <= number <= high for number in numbers):
            raise wrong(name, value, allowed, remedy)
        found.append(numbers)
    return found


def replace_field(data: bytes, name: str, value: int, ordinal: int = 0) -> bytes:
    """Return a tensor map's bytes with one field replaced (tensormap.replace).

    The result is not checked as a whole: a kernel may pass through inconsistent states between
    replacements. The copy that uses the map decodes and checks it.

    Args:
        data: the 128 bytes.
        name: "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride",
            "elemtype", "interleave_layout", "swizzle_mode" or "fill_mode".
        value: the new value as the instruction takes it (rank is one less than the rank).
        ordinal: dimension, for the fields that have one per dimension.

    Raises:
        ValueError: when the field, the dimension or the value is not allowed.
    """
    words = list(struct.unpack("<32I", data))
    if name == "global_address":
        words[0], words[1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    elif name == "global_dim":
        words[8 + _dimension(name, ordinal, 5)] = (value - 1) & 0xFFFFFFFF
    elif name == "global_stride":
        i = _dimension(name, ordinal, 4)
        if value % 16:
            raise ValueError(f"tensormap.replace global_stride {value} is no multiple of 16")
        words[3 + i] = value >> 4 & 0xFFFFFFFF
        words[7] = _insert(words[7], 4 * i, 4, value >> 36 & 0xF)
    elif name == "box_dim":
        i = _dimension(name, ordinal, 5)
        at, shift = (13, 24) if i == 0 else (14, 8 * (i - 1))
        words[at] = _insert(words[at], shift, 8, _ranged(name, value - 1, 256))
    elif name == "element_stride":
        i = _dimension(name, ordinal, 5)
        words[13] = _insert(words[13], 3 * i, 3, _ranged(name, value - 1, 8))
    elif name == "elemtype":
        number = _ranged(name, value, len(ELEMENT_TYPES))
        is_tf32 = number in (_TF32, _TF32_FTZ)
        words[2] = _insert(words[2], 7, 4, _code_of(number))
        words[2] = _insert(words[2], 16, 1, int(is_tf32))
    else:
        places = {
            "rank": (4, 3, 5),
            "interleave_layout": (11, 2, 3),
            "swizzle_mode": (13, 2, 4),
            "fill_mode": (15, 1, 2),
        }
        if name not in places:
            raise ValueError(f"tensormap.replace of field {name!r} is not implemented")
        shift, width, limit = places[name]
        words[2] = _insert(words[2], shift, width, _ranged(name, value, limit))
    return struct.pack("<32I", *words)


def with_address(tensor: TensorMap, address: int) -> TensorMap:
    """Return the tensor map with another global address."""
    return replace(tensor, address=address)


def _insert(word: int, shift: int, width: int, value: int) -> int:
    mask = ((1 << width) - 1) << shift
    return word & ~mask | value << shift


def _ranged(name: str, value: int, limit: int) -> int:
    if not 0 <= value < limit:
        raise ValueError(f"tensormap.replace {name}: stored value {value} is not in 0..{limit - 1}")
    return value


def _dimension(name: str, ordinal: int, limit: int) -> int:
    if not 0 <= ordinal < limit:
        raise ValueError(f"tensormap.replace {name}: dimension {ordinal} is not in 0..{limit - 1}")
    return ordinal
