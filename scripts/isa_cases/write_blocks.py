"""Write the files of the block cases, with what silicon gave where that was recorded.

Usage: python scripts/isa_cases/write_blocks.py                        without a recording
       python scripts/isa_cases/write_blocks.py block_outputs.npz DATE
Without a recording, files that silicon gave stay as they are while kernel and inputs are those
of the case; the evidence of every other one is the manual. A recorded output takes the place of the
expected one; where they differ, this says so.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import block_accesses
import block_barriers
import block_conversions
import block_copies
import block_doubles
import block_matrices
import block_sparse
import block_tcgen05
import block_tensors
import block_tmem
import block_wgmma
import numpy as np
from block_table import BlockCase, read, render

FOLDER = Path(__file__).parents[2] / "tests" / "emulator" / "isa" / "cases" / "blocks"


def every_case() -> Iterator[BlockCase]:
    """Yield all block cases."""
    for module in (
        block_accesses, block_copies, block_tensors, block_barriers, block_matrices, block_wgmma,
        block_tmem, block_tcgen05, block_conversions, block_sparse,
        block_doubles,
    ):  # fmt: skip
        yield from module.every_case()


def _files_from_silicon() -> dict[Path, str]:
    """Return the texts of the files whose outputs a GPU gave."""
    return {
        path.relative_to(FOLDER): path.read_text()
        for path in FOLDER.glob("*/*.ptx")
        if read(path).evidence.startswith("silicon")
    }


def _has_kernel_of(text: str, case: BlockCase) -> bool:
    """Return whether a file was made from the case as it is: its header and its kernel."""
    lines = render(case, "").splitlines()
    parts = [line for line in lines if not line.startswith(("// evidence:", "// out:"))]
    kept = [line for line in text.splitlines() if not line.startswith(("// evidence:", "// out:"))]
    return parts == kept


def main(recorded: str | None = None, date: str = "") -> int:
    """Write every file; return how many recorded outputs are not the expected ones."""
    outputs, silicon = {}, ""
    if recorded is not None:
        outputs = dict(np.load(recorded))
        stamp = json.loads(str(outputs.pop("stamp")))
        driver = re.search(r"\d+\.\d+\.\d+", stamp.get("driver", ""))
        silicon = f"silicon-sm90: {stamp['gpu']}, driver {driver[0] if driver else '?'}, {date}"
    recorded_before = {} if outputs else _files_from_silicon()
    shutil.rmtree(FOLDER, ignore_errors=True)
    num_different = count = num_kept = 0
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
        kept = recorded_before.get(case.path)
        if kept is not None and _has_kernel_of(kept, case):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(kept)
            count, num_kept = count + 1, num_kept + ("silicon-" in kept)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists(), f"two cases are called {case.path}"
        path.write_text(render(case, evidence))
        count += 1
    sys.stdout.write(f"{count} files, {len(outputs) or num_kept} of them with what silicon gave\n")
    return num_different


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
