"""Every file in `isa/cases/blocks` runs on the emulator and gives its outputs, bit for bit.

The files are written by `scripts/isa_cases/write_blocks.py`; each says whether its outputs come
from the manual or from silicon.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from fovea import emulator
from fovea.emulator.layout.tensor_map import encode_tensor_map, make_tensor_map
from fovea.emulator.machine.memory import GlobalMemory

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "isa_cases"))

import block_table as table

CASES = Path(__file__).parent / "isa" / "cases" / "blocks"
FILES = sorted(CASES.glob("*/*.ptx"))
GROUPS = set(
    (
        "access async barrier bulk cluster conversion double fence mbarrier mma sparse tcgen05 "
        "tensor tmem wgmma"
    ).split()
)


def aligned(words: np.ndarray) -> np.ndarray:
    """Return a copy at a multiple of 16 bytes, as tensor maps and bulk copies need."""
    raw = np.zeros(words.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    copy = raw[start : start + words.nbytes].view(np.uint32)
    copy[:] = words
    return copy


def run(case, seed: int = 0) -> np.ndarray:
    """Run a case; return `out`."""
    arrays = {"in": aligned(case.inputs), "out": aligned(case.before)}
    args: list = [arrays["in"], arrays["out"]]
    memory = GlobalMemory()
    if case.tensor is not None:
        tensor, over = case.tensor, arrays[case.tensor.over]
        memory.register(over, tensor.over)
        made = make_tensor_map(
            over.ctypes.data,
            tensor.element,
            tensor.sizes,
            tensor.strides,
            tensor.box,
            swizzle=tensor.swizzle,
            element_strides=tensor.element_strides or (1,) * len(tensor.sizes),
            fills_nan=tensor.fills_nan,
        )
        args.append(encode_tensor_map(made))
    emulator.load_ptx(case.text).launch(
        "case", case.cluster, case.threads, case.cluster, args,
        options=emulator.Options(seed=seed), memory=memory,
    )  # fmt: skip
    return arrays["out"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_block_case_gives_its_outputs(path):
    case = table.read(path)
    np.testing.assert_array_equal(run(case), case.expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_block_case_is_silent_and_equal_under_schedules(path):
    case = table.read(path)
    for seed in range(1, 6):
        np.testing.assert_array_equal(run(case, seed), case.expected)


def test_every_block_case_states_its_evidence():
    assert {path.parent.name for path in FILES} == GROUPS
    assert len(FILES) >= 500
    for path in FILES:
        evidence = table.read(path).evidence
        assert evidence.startswith(("manual-only: PTX ISA", "silicon-sm90: NVIDIA H200")), path
