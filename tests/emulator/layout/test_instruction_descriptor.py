import pytest

from fovea.emulator.layout.instruction_descriptor import decode_instruction_descriptor


def descriptor(m, n, *, a=1, b=1, d=1, extra=0):
    return d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24 | extra


def test_fields_of_a_bf16_product_are_decoded():
    got = decode_instruction_descriptor(descriptor(128, 96, extra=1 << 13 | 1 << 16), "f16", 1)
    assert (got.rows, got.columns, got.k_extent) == (128, 96, 16)
    assert (got.a_type, got.b_type, got.d_type) == ("bf16", "bf16", "f32")
    assert (got.a_is_negated, got.b_is_negated) == (True, False)
    assert (got.a_is_k_major, got.b_is_k_major) == (True, False)


@pytest.mark.parametrize(
    ("kind", "a", "b", "d", "names"),
    [
        ("f16", 0, 0, 0, ("f16", "f16", "f16")),
        ("tf32", 2, 2, 1, ("tf32", "tf32", "f32")),
        ("f8f6f4", 0, 5, 1, ("e4m3", "e2m1", "f32")),
        ("i8", 1, 0, 2, ("s8", "u8", "s32")),
    ],
)
def test_types_are_numbered_by_kind(kind, a, b, d, names):
    got = decode_instruction_descriptor(descriptor(128, 32, a=a, b=b, d=d), kind, 1)
    assert (got.a_type, got.b_type, got.d_type) == names


@pytest.mark.parametrize(
    ("value", "kind", "group", "message"),
    [
        (descriptor(128, 64, extra=1 << 2), "f16", 1, "sparse"),
        (descriptor(128, 64, extra=1 << 23), "f16", 1, "reserved"),
        (descriptor(128, 64, a=2), "f16", 1, "type 2 of A"),
        (descriptor(128, 64, a=0), "f16", 1, "must be equal"),
        (descriptor(128, 64, d=0), "f16", 1, "f32 only"),
        (descriptor(128, 64, extra=1 << 3), "f16", 1, "saturates"),
        (descriptor(256, 64), "f16", 1, r"M=256 with cta_group::1"),
        (descriptor(64, 64), "f16", 2, r"M=64 with cta_group::2"),
        (descriptor(128, 0), "f16", 1, "N=0"),
        (descriptor(256, 24), "f16", 2, "N=24"),
        (descriptor(128, 40, a=1, b=1, d=2), "i8", 1, "N=40"),
        (descriptor(128, 64, a=1, b=1, d=2, extra=1 << 14), "i8", 1, "negate"),
    ],
)
def test_products_the_hardware_lacks_are_refused(value, kind, group, message):
    with pytest.raises(ValueError, match=message):
        decode_instruction_descriptor(value, kind, group)
