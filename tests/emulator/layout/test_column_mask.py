"""Zero-column masks: the manual's four examples, bit for bit, and fields that are refused."""

import pytest

from fovea.emulator.layout.column_mask import decode_column_mask


def descriptor(
    starts: tuple[int, ...], first: tuple[int, ...], is_generated: int, spans: tuple[int, int]
) -> int:
    """Return a descriptor; fields of sub-mask 0 first, spans are (skip, use)."""
    value = is_generated << 39 | spans[0] << 40 | spans[1] << 48
    for n, (start, span) in enumerate(zip(starts, first, strict=True)):
        value |= start << 8 * n | span << 32 + n
    return value


@pytest.mark.parametrize(
    ("rows", "value", "masks"),
    [  # PTX ISA 9.7.16.4.3, examples 1 to 4; the least significant bit is column 0
        (128, descriptor((0,), (0,), 0, (4, 3)), ["0" * 14]),
        (128, descriptor((0,), (0,), 1, (2, 3)), ["11100001110000"]),
        (64, descriptor((0, 0), (1, 0), 1, (2, 3)), ["11100001110000111",
                                                      "11100001110000"]),
        (32, descriptor((0, 1, 2, 1), (1, 1, 0, 0), 1, (2, 3)),
         ["00001110000111", "0000111000011", "111000011100", "1110000111000"]),
    ],
)  # fmt: skip
def test_mask_is_the_one_of_the_manual_s_example(rows: int, value: int, masks: list[str]) -> None:
    columns = 64 * (128 // rows)
    zero = decode_column_mask(value, rows, columns, 0).zero
    for part, expected in enumerate(masks):
        bits = "".join("1" if bit else "0" for bit in zero[64 * part : 64 * part + 64])
        assert bits[::-1].endswith(expected), part


def test_shift_moves_the_first_column_of_b() -> None:
    assert decode_column_mask(2 << 56, 32, 128, 8).shift == 2


@pytest.mark.parametrize(
    ("value", "rows", "reuse", "message"),
    [(1 << 36, 128, 0, "reserved"), (9 << 56, 128, 8, "up to 8"), (17 << 56, 32, 32, "up to 16")],
)
def test_field_that_is_not_allowed_is_refused(
    value: int, rows: int, reuse: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode_column_mask(value, rows, 128, reuse)
