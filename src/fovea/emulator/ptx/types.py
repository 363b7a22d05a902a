"""PTX scalar types: sizes, and the numpy dtype that carries 32 lanes of each.

Lives here: the one mapping from a PTX type name to width, kind and numpy dtype. Not here: how a
register or a memory cell is accessed (`isa/instruction.py`, `machine/memory.py`). Invariant: a type
without a numpy twin (bf16, packed types, fp8) is carried as its raw unsigned bits.
"""

import numpy as np

LANES = 32

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}

# name -> (numpy dtype of one lane, bytes)
_NUMPY: dict[str, np.dtype] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
    "tf32": np.dtype(np.uint32),
    "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "e2m1x2": np.dtype(np.uint8),
    "e2m3x2": np.dtype(np.uint16),
    "e3m2x2": np.dtype(np.uint16),
    "ue8m0x2": np.dtype(np.uint16),
    "e4m3x4": np.dtype(np.uint32),
    "e5m2x4": np.dtype(np.uint32),
    "u16x2": np.dtype(np.uint32),
    "s16x2": np.dtype(np.uint32),
    "b128": np.dtype((np.void, 16)),
}
for _bits in ("8", "16", "32", "64"):
    _NUMPY["u" + _bits] = np.dtype("u" + str(_SIZES[_bits]))
    _NUMPY["b" + _bits] = np.dtype("u" + str(_SIZES[_bits]))
    _NUMPY["s" + _bits] = np.dtype("i" + str(_SIZES[_bits]))

REGISTER_TYPES = frozenset(
    ["pred", "b8", "b16", "b32", "b64", "b128"]
    + [k + b for k in "us" for b in ("8", "16", "32", "64")]
    + ["f16", "bf16", "f16x2", "bf16x2", "f32", "f64"]
)

# PTX ISA 10
SPECIAL_REGISTERS = frozenset(
    """%tid %ntid %laneid %warpid %nwarpid %ctaid %nctaid %smid %nsmid %gridid
    %is_explicit_cluster %clusterid %nclusterid %cluster_ctaid %cluster_nctaid %cluster_ctarank
    %cluster_nctarank %lanemask_eq %lanemask_le %lanemask_lt %lanemask_ge %lanemask_gt %clock
    %clock_hi %clock64 %globaltimer %globaltimer_lo %globaltimer_hi %reserved_smem_offset_begin
    %reserved_smem_offset_end %reserved_smem_offset_cap %total_smem_size %aggr_smem_size
    %dynamic_smem_size %reserved_smem_offset_0 %reserved_smem_offset_1
    %current_graph_exec""".split()
)
# nothing here could answer these: what the driver put there, and performance counters
OPAQUE_REGISTERS = frozenset(
    [f"%envreg{n}" for n in range(32)] + [f"%pm{n}{s}" for n in range(8) for s in ("", "_64")]
)


def numpy_dtype(ptx_type: str) -> np.dtype:
    """Return the numpy dtype that carries one lane of `ptx_type`.

    Raises:
        KeyError: the name is not a PTX scalar type.
    """
    return _NUMPY[ptx_type]


def size_bytes(ptx_type: str) -> int:
    """Return the width of `ptx_type` in bytes (a predicate counts as 1)."""
    return _NUMPY[ptx_type].itemsize


def is_scalar_type(name: str) -> bool:
    """Return whether `name` is a PTX scalar type this module knows."""
    return name in _NUMPY


def is_signed(ptx_type: str) -> bool:
    """Return whether values of `ptx_type` sign-extend when widened."""
    return ptx_type[0] == "s"


def is_float(ptx_type: str) -> bool:
    """Return whether `ptx_type` is carried by a numpy float dtype."""
    return _NUMPY[ptx_type].kind == "f"
