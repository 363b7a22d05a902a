"""Instruction descriptors of tcgen05.mma: shapes and types in 32 bits.

What lives here: decoding for kinds f16, tf32, f8f6f4 and i8, dense, sparse and weight stationary,
and for the block-scaled ones, which have another layout. Not here: block-scaled sparse products and
K of 96, which are not implemented.

Invariant: a decoded descriptor describes a product the hardware has, or decoding raises.

Source: PTX ISA 9.7.16.4.2 (tables 42 to 44), 9.7.16.2.1 (table 39).
"""

from dataclasses import dataclass

_A_B_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_D_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
K_EXTENT = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionDescriptor:
    """A decoded instruction descriptor.

    Attributes:
        sparsity: sparsity selector of a sparse A (None: A is dense).
        k_extent: K of the product; a sparse A stores half of it.
    """

    sparsity: int | None = None
    rows: int
    columns: int
    k_extent: int
    d_type: str
    a_type: str
    b_type: str
    a_is_negated: bool
    b_is_negated: bool
    a_is_k_major: bool
    b_is_k_major: bool
    saturates: bool


def _check_sparsity(value: int, *, is_sparse: bool) -> None:
    if bool(value >> 2 & 1) != is_sparse:
        says, has = ("dense", "has") if is_sparse else ("sparse", "lacks")
        raise ValueError(
            f"instruction descriptor {value:#010x} asks for a {says} A (bit 2), the instruction "
            f"{has} .sp"
        )


def _selector(value: int, kind: str) -> int:
    selector, allowed = value & 3, (0, 1) if kind in ("f16", "tf32") else (0,)
    if selector not in allowed:
        raise ValueError(f"sparsity selector {selector} with kind::{kind} (allowed: {allowed})")
    return selector


def decode_instruction_descriptor(
    value: int,
    kind: str,
    cta_group: int,
    *,
    is_sparse: bool = False,
    is_weight_stationary: bool = False,
) -> InstructionDescriptor:
    """Return the fields of an instruction descriptor.

    Raises:
        ValueError: when a field has a value that the kind or the CTA group does not allow.
    """
    _check_sparsity(value, is_sparse=is_sparse)
    if value & (1 << 6 | 1 << 23 | 1 << 29):
        raise ValueError(f"instruction descriptor {value:#010x} sets a reserved bit (6, 23 or 29)")
    a_type = _named(value >> 7 & 7, _A_B_TYPES[kind], "A", kind)
    b_type = _named(value >> 10 & 7, _A_B_TYPES[kind], "B", kind)
    if kind == "f16" and a_type != b_type:
        raise ValueError(f"kind::f16 with A of .{a_type} and B of .{b_type}; they must be equal")
    d_type = _named(value >> 4 & 3, _D_TYPES[kind], "D", kind)
    if a_type == "bf16" and d_type == "f16":
        raise ValueError("kind::f16 with .bf16 operands accumulates in .f32 only")
    saturates = bool(value >> 3 & 1)
    if kind != "i8" and saturates:
        raise ValueError(f"instruction descriptor {value:#010x} saturates; only kind::i8 may")
    if kind == "i8" and value >> 13 & 3:
        raise ValueError("kind::i8 cannot negate its operands (bits 13, 14)")
    rows, columns = (value >> 24 & 0x1F) << 4, (value >> 17 & 0x3F) << 3
    if is_weight_stationary:
        _check_weight_stationary(rows, columns)
    else:
        _check_shape(rows, columns, kind, cta_group)
    return InstructionDescriptor(
        sparsity=_selector(value, kind) if is_sparse else None,
        rows=rows,
        columns=columns,
        k_extent=K_EXTENT[kind] * (2 if is_sparse else 1),
        d_type=d_type,
        a_type=a_type,
        b_type=b_type,
        a_is_negated=bool(value >> 13 & 1),
        b_is_negated=bool(value >> 14 & 1),
        a_is_k_major=not value >> 15 & 1,
        b_is_k_major=not value >> 16 & 1,
        saturates=saturates,
    )


def _named(code: int, names: dict[int, str], matrix: str, kind: str) -> str:
    if code not in names:
        known = ", ".join(f"{number} {name}" for number, name in names.items())
        raise ValueError(f"type {code} of {matrix} does not exist in kind::{kind} (known: {known})")
    return names[code]


def _check_shape(rows: int, columns: int, kind: str, cta_group: int) -> None:
    allowed_rows = (64, 128) if cta_group == 1 else (128, 256)
    if rows not in allowed_rows:
        raise ValueError(f"M={rows} with cta_group::{cta_group} (allowed: {allowed_rows})")
    step = 8 * cta_group
    if kind == "i8":
        step = 16 * cta_group
        if cta_group == 1 and columns in (8, 24):
            return
    if not step <= columns <= 256 or columns % step:
        raise ValueError(
            f"N={columns} with kind::{kind}, cta_group::{cta_group} (allowed: multiples of {step} "
            "up to 256)"
        )


def _check_weight_stationary(rows: int, columns: int) -> None:
    if rows not in (32, 64, 128) or columns not in (64, 128, 256):
        raise ValueError(
            f"M={rows}, N={columns} with .ws (allowed: M of 32, 64 and 128, N of 64, 128 and 256)"
        )


# --- block-scaled kinds ---------------------------------------------------------------------------

_SCALED_TYPES: dict[str, dict[int, str]] = {
    "mxf8f6f4": _A_B_TYPES["f8f6f4"],
    "mxf4": {1: "e2m1x2"},
    "mxf4nvf4": {1: "e2m1x2"},
}
_RESERVED = {"mxf8f6f4": 0x8700004B, "mxf4": 0x0700104B, "mxf4nvf4": 0x0700104B}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDescriptor:
    """A decoded instruction descriptor of a block-scaled kind.

    Attributes:
        product: shape and types; "e2m1x2" is two packed 4-bit elements in a byte.
        scale_type: of both scale matrices, "ue8m0" or "ue4m3".
        a_scale_id: which bytes of a word of tensor memory hold the scales of A.
        b_scale_id: the same of B.
    """

    product: InstructionDescriptor
    scale_type: str
    a_scale_id: int
    b_scale_id: int


def decode_scaled_descriptor(value: int, kind: str, cta_group: int) -> ScaledDescriptor:
    """Return the fields of an instruction descriptor of kind mxf8f6f4, mxf4 or mxf4nvf4.

    Raises:
        ValueError: when a field has a value that the kind or the CTA group does not allow.
    """
    _check_sparsity(value, is_sparse=False)
    if kind != "mxf8f6f4" and value >> 31:
        raise ValueError(f"instruction descriptor {value:#010x} asks for K=96 (bit 31)")
    if value & _RESERVED[kind]:
        raise ValueError(
            f"instruction descriptor {value:#010x} sets a reserved bit of kind::{kind} "
            f"({value & _RESERVED[kind]:#x})"
        )
    types = _SCALED_TYPES[kind]
    a_type = _named(value >> 7 & 7, types, "A", kind)
    b_type = _named(value >> 10 & 7, types, "B", kind)
    scale_type = "ue8m0" if value >> 23 & 1 else "ue4m3"
    if kind != "mxf4nvf4" and scale_type == "ue4m3":
        raise ValueError(f"kind::{kind} scales with .ue8m0 only (bit 23 must be 1)")
    if kind != "mxf8f6f4" and value >> 15 & 3:
        raise ValueError(f"kind::{kind} cannot transpose its operands (bits 15, 16)")
    rows, columns = (value >> 27 & 3) << 7, (value >> 17 & 0x3F) << 3
    if rows == 64 or (cta_group == 1 and rows != 128):
        raise ValueError(f"M={rows} with kind::{kind}, cta_group::{cta_group} (allowed: 128)")
    _check_shape(rows, columns, kind, cta_group)
    product = InstructionDescriptor(
        rows=rows,
        columns=columns,
        k_extent=32 if kind == "mxf8f6f4" else 64,
        d_type="f32",
        a_type=a_type,
        b_type=b_type,
        a_is_negated=bool(value >> 13 & 1),
        b_is_negated=bool(value >> 14 & 1),
        a_is_k_major=not value >> 15 & 1,
        b_is_k_major=not value >> 16 & 1,
        saturates=False,
    )
    return ScaledDescriptor(
        product=product,
        scale_type=scale_type,
        a_scale_id=value >> 29 & 3,
        b_scale_id=value >> 4 & 3,
    )
