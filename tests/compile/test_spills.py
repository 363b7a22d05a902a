"""No shipped kernel keeps anything in local memory: no stack frame, no spilled register.

Two variants run by default; `-m slow` compiles those of all benchmarks and all GPU cases, which
takes minutes.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea.api.variants import origins
from fovea.arch import SM90
from fovea.compile.compiler import compile_variant
from fovea.compile.target import CompileTarget, native_host_triple
from fovea.compile.variant import ForwardVariant
from fovea.plan import select

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

from cases import CASES, case_named

from benchmarks import bench_decode, bench_forward_mods, prepare, shapes

# The calls that differ in their kernel: one of each head dim.
SHAPES = {str(shape): shape for shape in (*shapes.DENSE_SHAPES, *shapes.WIDE_SHAPES)}
DECODE = {f"decode D{call.D}": call for call in bench_decode.CALLS}
QUICK = ("B1 H16 S16384 D128 causal", "decode D128")


def _names() -> Iterator[Any]:
    mods = [make.__name__ for make in bench_forward_mods.CASES]
    cases = [f"case {case.name}" for case in CASES]
    for name in (*SHAPES, *mods, *DECODE, *cases):
        yield pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])


def _variants(name: str) -> list[ForwardVariant]:
    """Return the kernels of a benchmark or case; none where the kernels do not take it.

    A block mask has one for each way in which it may have been made.
    """
    if name.startswith("case "):
        problem = case_named(name.removeprefix("case ")).build("cpu", is_small=True).problem()
        if select.unsupported(problem, SM90) is not None:
            return []
        plans = {select.forward_plan(call, SM90): None for call, _ in origins(problem, SM90)}
        return [ForwardVariant(plan) for plan in plans]
    if name in DECODE:
        return [prepare.decode_variant(DECODE[name])]
    if name in SHAPES:
        return [prepare.variant_of(SHAPES[name], causal=SHAPES[name].causal)]
    names = [make.__name__ for make in bench_forward_mods.CASES]
    return prepare.mod_variants_of(bench_forward_mods.CASES[names.index(name)])


@functools.cache
def _local_bytes(variant: ForwardVariant) -> dict[str, int]:
    """Return local memory of a thread by kernel; the compiler runs once a variant."""
    target = CompileTarget(arch=SM90.target, host_triple=native_host_triple())
    kernels = compile_variant(variant, target).record.kernels
    return {name: used.stack_bytes + used.local_bytes for name, used in kernels.items()}


@pytest.mark.parametrize("name", list(_names()))
def test_kernel_uses_no_local_memory(name):
    variants = _variants(name)
    if not variants:
        pytest.skip("the kernels do not take this call")
    for variant in variants:
        found = _local_bytes(variant)
        assert found
        assert found == dict.fromkeys(found, 0)


def test_quick_names_exist():
    assert set(QUICK) <= {parameter.values[0] for parameter in _names()}
