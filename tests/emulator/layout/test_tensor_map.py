import struct
from dataclasses import replace

import pytest

from fovea.emulator.layout.tensor_map import (
    decode_tensor_map,
    encode_tensor_map,
    make_tensor_map,
    replace_field,
)
from fovea.emulator.layout.tensor_tile import clip_box

ADDRESS = 0x7F1234567000
# Words 2 to 14 of maps that CuTe-DSL 4.8.1 launchers packed, with what they were made from:
# (element, sizes, strides in elements, box, swizzle, words).
PACKED = [
    ("bf16", (64, 256), (64,), (64, 64), 128,
     "00046512 00000008 0 0 0 0 3f ff 0 0 0 3f000000 3f"),
    ("bf16", (64, 256), (64,), (32, 64), 64,
     "00044512 00000008 0 0 0 0 3f ff 0 0 0 1f000000 3f"),
    ("bf16", (64, 256), (64,), (16, 64), 32,
     "00042512 00000008 0 0 0 0 3f ff 0 0 0 0f000000 3f"),
    ("bf16", (64, 256), (64,), (8, 64), 0,
     "00040512 00000008 0 0 0 0 3f ff 0 0 0 07000000 3f"),
    ("f16", (64, 256), (64,), (64, 64), 128,
     "00046312 00000008 0 0 0 0 3f ff 0 0 0 3f000000 3f"),
    ("f32", (64, 256), (64,), (32, 64), 128,
     "00046392 00000010 0 0 0 0 3f ff 0 0 0 1f000000 3f"),
    ("tf32", (64, 256), (64,), (32, 64), 128,
     "00056392 00000010 0 0 0 0 3f ff 0 0 0 1f000000 3f"),
    ("f64", (64, 256), (64,), (16, 64), 128,
     "00246492 00000020 0 0 0 0 3f ff 0 0 0 0f000000 3f"),
    ("u32", (64, 256), (64,), (32, 64), 128,
     "00046112 00000010 0 0 0 0 3f ff 0 0 0 1f000000 3f"),
    ("u64", (64, 256), (64,), (16, 64), 128,
     "00246212 00000020 0 0 0 0 3f ff 0 0 0 0f000000 3f"),
    ("u8", (64, 256), (64,), (64, 64), 64,
     "00044012 00000004 0 0 0 0 3f ff 0 0 0 3f000000 3f"),
    ("u16", (64, 256), (64,), (64, 64), 128,
     "00046092 00000008 0 0 0 0 3f ff 0 0 0 3f000000 3f"),
    ("bf16", (64, 256, 3, 5, 7), (6720, 64, 192, 960), (64, 16, 2, 3, 4), 128,
     "00246542 00000348 8 18 78 0 3f ff 2 4 6 3f000000 0302010f"),
    ("bf16", (64, 256, 3), (64, 1 << 33), (64, 64, 1), 128,
     "00246522 00000008 40000000 0 0 0 3f ff 2 0 0 3f000000 3f"),
    ("bf16", (64, 256, 3), (1 << 36, 64), (64, 64, 1), 128,
     "00246522 00000000 8 0 0 2 3f ff 2 0 0 3f000000 3f"),
    ("bf16", (64,), (), (64,), 0,
     "00040502 0 0 0 0 0 3f 0 0 0 0 3f000000 0"),
]  # fmt: skip


@pytest.mark.parametrize(("element", "sizes", "strides", "box", "swizzle", "words"), PACKED)
def test_packed_map_decodes_to_what_it_was_made_from(element, sizes, strides, box, swizzle, words):
    values = [ADDRESS & 0xFFFFFFFF, ADDRESS >> 32, *(int(word, 16) for word in words.split())]
    data = struct.pack("<15I", *values).ljust(128, b"\xee")
    got = decode_tensor_map(data)
    expected = make_tensor_map(
        ADDRESS,
        element,
        sizes,
        tuple(stride * got.element.size_bytes for stride in strides),
        box,
        swizzle=swizzle,
    )
    assert got == expected
    assert encode_tensor_map(expected)[:60] == data[:60]


def test_replaced_fields_decode_to_the_new_values():
    data = encode_tensor_map(
        make_tensor_map(ADDRESS, "bf16", (64, 256), (128,), (64, 64), swizzle=128)
    )
    edits = [
        ("global_address", 0x7F00DEAD0000, 0),
        ("rank", 2, 0),
        ("global_dim", 96, 0),
        ("global_dim", 1000, 1),
        ("global_dim", 5, 2),
        ("global_stride", 192, 0),
        ("global_stride", 1 << 38, 1),
        ("box_dim", 16, 0),
        ("box_dim", 256, 1),
        ("box_dim", 2, 2),
        ("element_stride", 2, 1),
        ("elemtype", 7, 0),
        ("swizzle_mode", 2, 0),
        ("fill_mode", 1, 0),
    ]
    for name, value, ordinal in edits:
        data = replace_field(data, name, value, ordinal)
    assert decode_tensor_map(data) == make_tensor_map(
        0x7F00DEAD0000,
        "f32",
        (96, 1000, 5),
        (192, 1 << 38),
        (16, 256, 2),
        element_strides=(1, 2, 1),
        swizzle=64,
        fills_nan=True,
    )


def test_map_built_from_zeroed_memory_by_replacements_is_complete():
    data = bytes(128)
    edits = [
        ("global_address", ADDRESS, 0), ("rank", 1, 0), ("box_dim", 64, 0), ("box_dim", 32, 1),
        ("global_dim", 128, 0), ("global_dim", 100, 1), ("global_stride", 256, 0),
        ("element_stride", 1, 0), ("element_stride", 1, 1), ("elemtype", 10, 0),
        ("interleave_layout", 0, 0), ("swizzle_mode", 3, 0), ("fill_mode", 0, 0),
    ]  # fmt: skip
    for name, value, ordinal in edits:
        data = replace_field(data, name, value, ordinal)
    got = decode_tensor_map(data)
    expected = make_tensor_map(ADDRESS, "bf16", (128, 100), (256,), (64, 32), swizzle=128)
    assert got == replace(expected, l2_promotion=0)


@pytest.mark.parametrize(
    ("name", "value", "ordinal", "message"),
    [
        ("global_stride", 24, 0, "multiple of 16"),
        ("box_dim", 257, 0, "not in 0..255"),
        ("global_dim", 4, 5, "dimension 5"),
        ("swizzle_mode", 4, 0, "not in 0..3"),
        ("swizzle_atomicity", 0, 0, "not implemented"),
    ],
)
def test_replacing_a_field_by_a_wrong_value_is_refused(name, value, ordinal, message):
    with pytest.raises(ValueError, match=message):
        replace_field(bytes(128), name, value, ordinal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"box": (128, 64)}, r"box=\(128, 64\).*no wider than swizzle=128"),
        ({"box": (257, 64)}, r"box=\(257, 64\).*1 to 256"),
        ({"box": (12, 64)}, r"box=\(12, 64\).*a multiple of 8 up to 64 elements"),
        ({"strides": (136,)}, r"strides=\(136,\).*multiples of 16"),
        ({"address": ADDRESS + 8}, "a multiple of 16"),
        ({"element_strides": (1, 9)}, r"element_strides=\(1, 9\).*1 to 8"),
    ],
)
def test_map_that_the_engine_refuses_is_an_error(changes, message):
    fields = {
        "address": ADDRESS,
        "element": "bf16",
        "sizes": (128, 256),
        "strides": (256,),
        "box": (64, 64),
        "swizzle": 128,
    }
    with pytest.raises(ValueError, match=message):
        make_tensor_map(**(fields | changes))


def test_bytes_that_are_no_map_are_refused():
    with pytest.raises(ValueError, match="tag is 7"):
        decode_tensor_map(bytes(8) + b"\x07" + bytes(119))
    with pytest.raises(ValueError, match="multiple of 16"):
        decode_tensor_map(bytes(128))
    with pytest.raises(ValueError, match="128 bytes, got 64"):
        decode_tensor_map(bytes(64))


def packed_4_bit_map() -> bytes:
    """A map of 256 x 256 packed 4-bit elements, boxes of 256 x 128, as CuTe-DSL packs it."""
    words = [0] * 32
    words[0], words[1] = ADDRESS & 0xFFFFFFFF, ADDRESS >> 32
    fields = [0x465A2, 8, 0x800, 0, 0, 0, 0xFF, 0xFF, 0, 0, 0, 0xFF000000, 0x7F]
    words[2:15] = fields
    return struct.pack("<32I", *words)


def test_packed_4_bit_map_counts_bytes_of_dimension_0() -> None:
    tensor = decode_tensor_map(packed_4_bit_map())
    assert tensor.element.name == "b4x16"
    assert (tensor.sizes, tensor.box) == ((128, 256, 1), (128, 128, 1))
    assert tensor.strides[:2] == (1, 128)
    assert tensor.box_bytes == 128 * 128
    assert encode_tensor_map(tensor)[:60] == packed_4_bit_map()[:60]


def test_packed_4_bit_coordinates_are_elements_and_must_be_even() -> None:
    tensor = decode_tensor_map(packed_4_bit_map())
    assert clip_box(tensor, (64, 3, 0)).address == ADDRESS + 3 * 128 + 32
    with pytest.raises(ValueError, match="multiple of 2"):
        clip_box(tensor, (65, 3, 0))


def test_padded_4_bit_and_6_bit_maps_are_refused() -> None:
    data = bytearray(packed_4_bit_map())
    data[8] &= 0x7F  # element type 12: its bits are 7 to 10 of word 2
    data[9] = data[9] & ~0x07 | 0x06
    with pytest.raises(ValueError, match="type 12 is not implemented"):
        decode_tensor_map(bytes(data))
