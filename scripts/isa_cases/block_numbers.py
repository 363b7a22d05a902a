"""Small whole numbers in the formats of the matrix instructions.

Products of such numbers are exact in every format of the accumulators and in every order of their
sums, so that the expected bits follow from the manual alone.
"""

import numpy as np

# Format -> bytes of an element, largest number used.
FORMATS = {"bf16": (2, 8), "f16": (2, 8), "tf32": (4, 8), "e4m3": (1, 8), "e5m2": (1, 4),
           "s8": (1, 127), "u8": (1, 255), "f64": (8, 8)}  # fmt: skip


def draw(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return whole numbers that the format holds exactly."""
    top = FORMATS[kind][1]
    return rng.integers(0 if kind == "u8" else -top, top + 1, shape)


def encode(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers' bits as unsigned integers of the format's width."""
    if kind in ("s8", "u8"):
        return (numbers % 256).astype(np.uint8)
    if kind == "f64":
        return numbers.astype(np.float64).view(np.uint64)
    if kind == "f16":
        return numbers.astype(np.float16).view(np.uint16)
    single = numbers.astype(np.float32).view(np.uint32)
    if kind in ("tf32", "f32"):
        return single
    if kind == "bf16":
        return (single >> 16).astype(np.uint16)
    fraction_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[kind]
    exponent = (single >> 23 & 0xFF).astype(np.int64) - 127 + bias
    fraction = single >> (23 - fraction_bits) & ((1 << fraction_bits) - 1)
    code = (exponent << fraction_bits | fraction) | (single >> 31 << 7)
    return np.where(numbers == 0, 0, code).astype(np.uint8)


def results(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Return accumulators' bits: f32, f16, s32 or f64."""
    if kind == "s32":
        return numbers.astype(np.int32).view(np.uint32)
    return encode(numbers, kind)
