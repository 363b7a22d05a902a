"""Every file in `cases/` runs on the emulator and gives the values recorded on silicon."""

import hashlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea import emulator

CASES = Path(__file__).parent / "cases"
SCRIPTS = Path(__file__).parents[3] / "scripts" / "isa_cases"
FILES = sorted(CASES.glob("*/*.ptx"))
# MUFU model against silicon: error relative to max(1, |expected|); PTX ISA 9.7.3 gives about
# 2^-22 for most of them, 2^-14.7 for sin and cos outside [-pi, pi], 2^-10.987 for tanh
BOUNDS = {"tanh": 2.0**-10, "sin": 2.0**-14.7, "cos": 2.0**-14.7}
BOUND = 2.0**-20


@dataclass(slots=True)
class Recorded:
    """A case file: its text, inputs, outputs."""

    text: str
    inputs: np.ndarray
    outputs: np.ndarray
    kinds: tuple[str, ...]
    is_approximate: bool


def read_case(path: Path) -> Recorded:
    """Read a case file with the values in its header."""
    text = path.read_text()
    columns: dict[str, list[list[int]]] = {"in": [], "out": []}
    kinds: list[str] = []
    for line in text.splitlines():
        label, _, words = line.removeprefix("// ").partition(": ")
        role, _, kind = label.partition(" ")
        if line.startswith("// ") and role in columns and kind:
            columns[role].append([int(word, 16) for word in words.split()])
            if role == "out":
                kinds.append(kind)
    inputs = np.array(columns["in"] or [[0] * 32], np.uint64).T.copy()
    outputs = np.array(columns["out"], np.uint64).T.copy()
    return Recorded(text, inputs, outputs, tuple(kinds), "// approximate" in text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case_gives_recorded_values(path: Path) -> None:
    case = read_case(path)
    got = np.zeros_like(case.outputs)
    emulator.load_ptx(case.text).launch("case", 1, 32, args=[case.inputs, got])
    if not case.is_approximate:
        np.testing.assert_array_equal(got, case.outputs)
        return
    bound = BOUNDS.get(path.stem.partition("_")[0], BOUND)
    value, expected = (_as_float(x) for x in (got, case.outputs))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(value), np.isnan(expected))
    np.testing.assert_array_equal(value[np.isinf(expected)], expected[np.isinf(expected)])
    error = np.abs(value[finite] - expected[finite])
    assert (error <= bound * np.maximum(1, np.abs(expected[finite]))).all()


def _as_float(slots: np.ndarray) -> np.ndarray:
    return slots.astype(np.uint32).view(np.float32).astype(np.float64)


def test_every_case_has_a_file_that_names_its_evidence() -> None:
    assert len(FILES) >= 500
    for path in FILES:
        assert "// evidence: silicon-sm90: NVIDIA H200" in path.read_text()


@pytest.mark.slow
def test_random_batches_match_silicon_bit_for_bit() -> None:
    table, forms = _load_script("case_table"), _load_script("case_forms")
    recorded = json.loads((CASES / "fuzz.json").read_text())
    write = _load_script("write")
    wrong: list[str] = []
    for case in forms.every_case():
        digest = recorded["sha256"].get(f"{case.group}/{write.file_name(case)}")
        if digest is None:
            continue
        inputs = table.inputs_of(case, recorded["threads"], 1)
        got = np.zeros((recorded["threads"], len(case.outputs)), np.uint64)
        module = emulator.load_ptx(table.render(case))
        module.launch("case", recorded["threads"] // 32, 32, args=[inputs, got])
        if hashlib.sha256(got.tobytes()).hexdigest() != digest:
            wrong.append(case.name)
    assert wrong == []


def _load_script(name: str) -> Any:
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get(name) or importlib.util.module_from_spec(spec)
    if name not in sys.modules:
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module
