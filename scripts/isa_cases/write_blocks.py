"""Write the files of the block cases, with what silicon gave where that was recorded.

Usage: python scripts/isa_cases/write_blocks.py                        without a recording
       python scripts/isa_cases/write_blocks.py block_outputs.npz DATE
Without a recording the evidence of every case is the manual. A recorded output takes the place of
the expected one; where they differ, this says so.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import block_accesses
import block_barriers
import block_copies
import block_matrices
import block_tcgen05
import block_tensors
import block_tmem
import block_wgmma
import numpy as np
from block_table import BlockCase, render

FOLDER = Path(__file__).parents[2] / "tests" / "emulator" / "isa" / "cases" / "blocks"


def every_case() -> Iterator[BlockCase]:
    """Yield all block cases."""
    for module in (
        block_accesses, block_copies, block_tensors, block_barriers, block_matrices, block_wgmma,
        block_tmem, block_tcgen05,
    ):  # fmt: skip
        yield from module.every_case()


def main(recorded: str | None = None, date: str = "") -> int:
    """Write every file; return how many recorded outputs are not the expected ones."""
    outputs, silicon = {}, ""
    if recorded is not None:
        outputs = dict(np.load(recorded))
        stamp = json.loads(str(outputs.pop("stamp")))
        driver = re.search(r"\d+\.\d+\.\d+", stamp.get("driver", ""))
        silicon = f"silicon-sm90: {stamp['gpu']}, driver {driver[0] if driver else '?'}, {date}"
    shutil.rmtree(FOLDER, ignore_errors=True)
    num_different = count = 0
    for case in every_case():
        evidence = f"manual-only: {case.source}"
        found = outputs.get(str(case.path))
        if found is not None:
            evidence = silicon
            if not np.array_equal(found, case.expected):
                num_different += 1
                sys.stdout.write(f"{case.path}: silicon differs from the manual's values\n")
                case = BlockCase(
                    **{name: getattr(case, name) for name in case.__slots__} | {"expected": found}
                )
        path = FOLDER / case.path
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists(), f"two cases are called {case.path}"
        path.write_text(render(case, evidence))
        count += 1
    sys.stdout.write(f"{count} files, {len(outputs)} of them recorded on silicon\n")
    return num_different


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
