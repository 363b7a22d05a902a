"""Write `tests/emulator/isa/cases/*.ptx` and `fuzz.json` from outputs that `record.py` brought.

Usage: python scripts/isa_cases/write.py isa_outputs.npz isa_stamp.json DATE
"""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
from case_forms import every_case
from case_table import Case, inputs_of, render
from record import FUZZ_THREADS

CASES = Path(__file__).parents[2] / "tests" / "emulator" / "isa" / "cases"


def file_name(case: Case) -> str:
    """Return the file name of a case."""
    return re.sub(r"[^A-Za-z0-9]+", "_", case.name).strip("_") + ".ptx"


def header(case: Case, inputs: np.ndarray, outputs: np.ndarray, evidence: str) -> str:
    """Return the comment lines that hold inputs and expected outputs, a line per operand."""
    lines = [f"// case: {case.name}", f"// evidence: {evidence}"]
    if case.is_approximate:
        lines.append("// approximate")
    for label, kinds, values in (("in", case.inputs, inputs), ("out", case.outputs, outputs)):
        for j, kind in enumerate(kinds):
            words = " ".join(f"{int(value):x}" for value in values[:, j])
            lines.append(f"// {label} {kind}: {words}")
    return "\n".join(lines) + "\n"


def main(outputs: Path, stamp: Path, date: str) -> None:
    """Write one file per case, and the digests of the random batches."""
    recorded = np.load(outputs)
    info = json.loads(stamp.read_text())
    driver = re.search(r"\d+\.\d+\.\d+", info["stamp"]["driver"])
    evidence = (
        f"silicon-sm90: {info['stamp']['gpu']}, driver {driver[0] if driver else '?'}, {date}"
    )
    CASES.mkdir(parents=True, exist_ok=True)
    fuzz: dict[str, str] = {}
    for number, case in enumerate(every_case()):
        if case.name in info["failed"]:
            continue
        folder = CASES / case.group
        folder.mkdir(exist_ok=True)
        text = header(case, inputs_of(case), recorded[f"case{number}"], evidence)
        (folder / file_name(case)).write_text(text + render(case))
        if not case.is_approximate:
            digest = hashlib.sha256(recorded[f"fuzz{number}"].tobytes()).hexdigest()
            fuzz[f"{case.group}/{file_name(case)}"] = digest
    report = {"stamp": info["stamp"] | {"date": date}, "threads": FUZZ_THREADS, "sha256": fuzz}
    (CASES / "fuzz.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
