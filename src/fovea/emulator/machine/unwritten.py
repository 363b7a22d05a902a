"""What registers and memory that nobody has written hold when a launch is run again (`junk.py`).

Lives here: those bytes. Not here: who may read them. Invariant: of the three contents every bit is
0 in one and 1 in another, neighbours differ, and no float in any format is infinite or NaN (so that
a product with 0 is 0).
"""

import numpy as np

from fovea.emulator.isa.instruction import Array
from fovea.emulator.ptx.types import LANES

CONTENTS = (0, 1, 2)  # zero, bytes of all kinds, and their complement
_PERIOD = 65521  # a prime: no two rows of a tile hold the same
# neither the highest exponent of a float, of which these bits of its last byte are a part, nor the
# complement of that
_EXPONENT = 0x7C
_ALLOWED = np.array([b for b in range(256) if 0 < b & _EXPONENT < _EXPONENT], np.uint8)
_BYTES = _ALLOWED[np.random.default_rng(5).integers(0, len(_ALLOWED), _PERIOD)]


def unwritten_bytes(content: int, size: int) -> Array:
    """Return `size` bytes of unwritten memory."""
    if not content:
        return np.zeros(size, np.uint8)
    return np.resize(_BYTES if content == 1 else ~_BYTES, size)


def unwritten_registers(content: int, dtypes: list[np.dtype]) -> list[Array]:
    """Return 32 lanes of each unwritten register."""
    widest = 16
    raw = unwritten_bytes(content, LANES * widest * len(dtypes)).reshape(len(dtypes), -1)
    return [
        (row[:LANES] & 8).astype(np.bool_)
        if dtype.kind == "b"
        else row[: LANES * dtype.itemsize].view(dtype)
        for row, dtype in zip(raw, dtypes, strict=True)
    ]
