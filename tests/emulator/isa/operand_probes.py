"""What is put in the place of an operand: a register of every type, and what is no register.

Not a test itself: `test_operand_types.py` and `test_operand_kinds.py` import it, and so does
`scripts/isa_cases/record_operand_types.py`, which asks ptxas about each.
"""

TYPES = ("b8 u8 s8 b16 u16 s16 f16 b32 u32 s32 f32 f16x2 b64 u64 s64 f64 b128 pred").split()
KINDS = {
    "int": "1",
    "decimal": "1.5",
    "single": "0f3F800000",
    "double": "0d3FF0000000000000",
    "special": "%tid.x",
    "special64": "%clock64",
    "name": "sm",
    "sink": "_",
    "one": "{%b32_139}",
    "negated": "!%pred_1",
}
