"""Compile the tests' toy kernels into a folder, for `check_artifacts.py` on a GPU machine.

Run from the repository's root, with the compiler installed, no GPU needed:
    PYTHONPATH=src python scripts/gpu/make_toys.py FOLDER [--arch sm_90a]
"""

import argparse
import sys
from pathlib import Path

from fovea.compile.compiler import compile_variant
from fovea.compile.target import ARCHS, CompileTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "compile"))
from toy_variants import ToyAdd


def main() -> None:
    """Compile the toys and say what they use."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=ARCHS, default="sm_90a")
    parser.add_argument("--host-triple", default="", help="default: this machine's")
    options = parser.parse_args()
    target = CompileTarget(arch=options.arch, host_triple=options.host_triple)
    for variant in (ToyAdd(), ToyAdd(threads=256)):
        folder = options.folder / f"{variant.name}_{variant.threads}"
        artifact = compile_variant(variant, target).write(folder)
        sys.stdout.write(f"{folder}: {artifact.num_bytes} bytes, {artifact.record.kernels}\n")


if __name__ == "__main__":
    main()
