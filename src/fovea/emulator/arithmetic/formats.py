"""Element formats of matrix operands, and their values as float32.

What lives here: the formats' parameters and decoding of raw bits. Not here: accumulation
(accumulate.py) or conversion instructions (isa/conversion.py).

Invariant: every value of every format here is exact in float32.

Source: PTX ISA, "Alternate floating-point data formats"; OCP 8-bit floating point specification.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A floating-point operand format as the matrix unit sees it.

    Attributes:
        name: as PTX writes it.
        size_bytes: storage of one element.
        exponent_bits: width of the exponent field.
        fraction_bits: fraction bits the unit uses.
    """

    name: str
    size_bytes: int
    exponent_bits: int
    fraction_bits: int

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 2 - (1 << (self.exponent_bits - 1))


FORMATS = {
    item.name: item
    for item in (
        ElementFormat("f32", 4, 8, 23),
        ElementFormat("tf32", 4, 8, 10),
        ElementFormat("bf16", 2, 8, 7),
        ElementFormat("f16", 2, 5, 10),
        ElementFormat("e5m2", 1, 5, 2),
        ElementFormat("e4m3", 1, 4, 3),
        ElementFormat("e3m2", 1, 3, 2),
        ElementFormat("e2m3", 1, 2, 3),
        ElementFormat("e2m1", 1, 2, 1),
    )
}


def to_float32(raw: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Return the values of raw elements (unsigned integers of the storage size) as float32.

    A tf32 operand is f32 storage whose low 13 bits the unit does not read.
    """
    if name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "f32":
        return raw.view(np.float32)
    return _small_values(name)[raw]


@cache
def _small_values(name: str) -> NDArray[np.float32]:
    """Return the values of all 256 bytes of a format of at most 8 bits (high bits ignored)."""
    form = FORMATS[name]
    code = np.arange(256)
    width = 1 + form.exponent_bits + form.fraction_bits
    sign = np.where(code >> (width - 1) & 1, -1.0, 1.0)
    exponent = code >> form.fraction_bits & ((1 << form.exponent_bits) - 1)
    fraction = (code & ((1 << form.fraction_bits) - 1)) / (1 << form.fraction_bits)
    scale = np.maximum(exponent, 1) - 1 + form.min_exponent
    value = sign * np.where(exponent > 0, 1.0 + fraction, fraction) * 2.0**scale
    if name == "e5m2":
        special = exponent == 31
        value = np.where(special, np.where(fraction > 0, np.nan, sign * np.inf), value)
    if name == "e4m3":
        value = np.where(code & 0x7F == 0x7F, np.nan, value)
    table = value.astype(np.float32)
    table.flags.writeable = False
    return table
