"""Structured sparse operands: packed elements and the metadata that places them.

Lives here: which element of a chunk each stored one is, and where the 4-bit codes of a row lie in
registers and in tensor memory. Not here: products (`isa/`). Invariant: a row of A of K elements is
stored as K / 2, in order; every chunk has a code of its own.

A chunk is 4 elements of which 2 are stored (2:4), for tf32 2 elements of which 1 is (1:2). A code
holds the two positions, the lower two bits first; for tf32 0b0100 is position 0 and 0b1110 is 1.

Source: PTX ISA 9.7.15.5.15 (mma.sp), 9.7.15.6.1 (wgmma), 9.7.16.10.8 (tcgen05). The manual gives
the places in figures only. Those in registers are an H200's (evidence: silicon-sm90); those in
tensor memory follow from its text where that suffices, and from emulators of others that were
compared with a B200 (evidence: inferred).
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint32]

# what the manual calls meaningful (the others are undefined): codes of pairs in ascending order,
# and for tcgen05 one in descending order too
ORDERED = frozenset((0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110))
TENSOR_MEMORY = ORDERED | {0b0110}
DISTINCT = frozenset(code for code in range(16) if code & 3 != code >> 2)
ONE_OF_TWO = frozenset((0b0100, 0b1110))


def codes_from_registers(
    words: NDArray[np.uint32], selector: int, chunks: int, *, is_narrow: bool
) -> Codes:
    """Return the codes of 16 rows from the metadata registers of a warp.

    Row r belongs to the four threads of group r mod 8. With 4 chunks a row the selector names one
    of them, with 8 a pair, with 16 all four count. Of 8-bit elements a word holds 8 codes of one
    row, the even threads' of row r, the odd ones' of row r + 8; of wider ones 4 codes of row r,
    then 4 of row r + 8.

    Shapes:
        words: [32].
        result: [16, chunks].

    Raises:
        ValueError: the selector does not exist for this number of chunks.
    """
    allowed = {4: 4, 8: 2, 16: 1}[chunks]
    if not 0 <= selector < allowed:
        raise ValueError(f"sparsity selector {selector} (allowed: 0 to {allowed - 1})")
    row, chunk = np.meshgrid(np.arange(16), np.arange(chunks), indexing="ij")
    first = 4 * (row % 8) + selector * (chunks // 4)
    if is_narrow:
        lane, nibble = first + 2 * (chunk // 8) + row // 8, chunk % 8
    else:
        lane, nibble = first + chunk // 4, 4 * (row // 8) + chunk % 4
    return words[lane] >> (4 * nibble).astype(np.uint32) & np.uint32(0xF)


def codes_from_tensor_memory(cells: NDArray[np.uint32], chunks: int, *, is_narrow: bool) -> Codes:
    """Return the codes of the rows that lie in consecutive lanes.

    8-bit and narrower elements: lane r holds the codes of row r. Others: 16 lanes hold those of 16
    rows, lane l those of rows l mod 8 (low half) and l mod 8 + 8 in the chunks 4 * (l / 8) to + 3.

    Shapes:
        cells: [rows, columns].
        result: [rows, chunks].
    """
    row, chunk = np.meshgrid(np.arange(len(cells)), np.arange(chunks), indexing="ij")
    if is_narrow:
        lane, column, nibble = row, chunk // 8, chunk % 8
    else:
        lane = 16 * (row // 16) + row % 8 + 8 * (chunk // 4)
        column, nibble = np.zeros_like(row), 4 * (row % 16 // 8) + chunk % 4
    return cells[lane, column] >> (4 * nibble).astype(np.uint32) & np.uint32(0xF)


def expand(
    packed: NDArray[np.generic], codes: Codes, allowed: frozenset[int]
) -> NDArray[np.generic]:
    """Return the whole rows of packed ones, with zeros where nothing is stored.

    Shapes:
        packed: [rows, K / 2].
        codes: [rows, chunks].
        result: [rows, K].

    Raises:
        ValueError: a code that the instruction does not define.
    """
    is_known = np.isin(codes, list(allowed))
    if not is_known.all():
        row, chunk = (int(place) for place in np.argwhere(~is_known)[0])
        raise ValueError(
            f"sparsity metadata {int(codes[row, chunk]):#06b} of row {row}, chunk {chunk} "
            f"(allowed: {', '.join(f'{code:#06b}' for code in sorted(allowed))})"
        )
    rows, stored = packed.shape
    per_chunk = stored // codes.shape[1]
    dense = np.zeros((rows, codes.shape[1], 2 * per_chunk), packed.dtype)
    places = np.stack((codes & 3, codes >> 2), axis=-1)
    if per_chunk == 1:
        places = (codes == 0b1110).astype(np.uint32)[..., None]
    np.put_along_axis(
        dense, places.astype(np.int64), packed.reshape(rows, codes.shape[1], per_chunk), axis=2
    )
    return dense.reshape(rows, 2 * stored)
