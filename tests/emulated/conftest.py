"""Kernels run by the emulator: they need the compiler and llvmlite."""

import sys
from pathlib import Path

import pytest

from fovea.compile import key

# Modules shared by the tests here, and the cases that GPU tests run too.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gpu")]

if key.compiler_version() is None:
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("llvmlite", reason="the emulator runs launchers with llvmlite")
