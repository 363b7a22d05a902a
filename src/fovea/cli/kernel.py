"""The kernel of a call, compiled on any machine, and what it uses.

Lives here: from a call to its artifact, and the table of resources. Choosing the plan is
`plan/select.py`'s, compiling `compile/`'s work. Invariant: every figure comes from the compiled
binary or the plan it was compiled from, and the table says which.
"""

import time
from dataclasses import dataclass

from rich.table import Table

from fovea import env
from fovea.arch import Arch
from fovea.cli.disassembly import InstructionCounts, count_instructions
from fovea.compile import cache, key
from fovea.compile.artifact import Artifact
from fovea.compile.target import CompileTarget
from fovea.compile.variant import ForwardVariant
from fovea.errors import UnsupportedError
from fovea.plan import select
from fovea.plan.forward import ForwardPlan
from fovea.problem import AttentionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A compiled forward kernel.

    Attributes:
        seconds: how long it took to have it.
        origin: where it came from: "the disk cache", "the bundle" or "the compiler".
        counts: instructions of its machine code, None where no nvdisasm is installed.
    """

    arch: Arch
    plan: ForwardPlan
    artifact: Artifact
    seconds: float
    origin: str
    counts: InstructionCounts | None


def compile_forward(problem: AttentionProblem, arch: Arch) -> CompiledKernel:
    """Return the forward kernel of a problem for an architecture.

    Raises:
        UnsupportedError: there is no such kernel, or no compiler here.
    """
    lack = select.unsupported(problem, arch)
    if lack is not None:
        raise UnsupportedError(f"no kernel for this call: {lack}; the reference takes it")
    plan = select.forward_plan(problem, arch)
    variant, target = ForwardVariant(plan), CompileTarget(arch=arch.target)
    is_cached = cache.default_cache().load(key.cache_key(variant, target)) is not None
    start = time.perf_counter()
    artifact = cache.get_artifact(variant, target)
    seconds = time.perf_counter() - start
    bundle = env.bundle()
    if bundle is not None and artifact.directory and artifact.directory.is_relative_to(bundle):
        origin = "the bundle"
    else:
        origin = "the disk cache" if is_cached else "the compiler"
    return CompiledKernel(
        arch=arch,
        plan=plan,
        artifact=artifact,
        seconds=seconds,
        origin=origin,
        counts=count_instructions(artifact.cubin),
    )


def resource_table(kernel: CompiledKernel) -> Table:
    """Return what the kernel uses, from its cubin, its plan and its disassembly.

    Local memory and instructions count a merge of parts of the keys, too, where one follows.
    """
    record = kernel.artifact.record
    resources = next(used for name, used in record.kernels.items() if name.startswith(record.name))
    local = sum(used.stack_bytes + used.local_bytes for used in record.kernels.values())
    plan, counts = kernel.plan, kernel.counts
    by_role = ", ".join(f"{role.name} {role.registers}" for role in plan.roles)
    rows = {
        "tile": f"{plan.tile_m} query rows x {plan.tile_n} keys, {plan.kv_stages} K/V stages",
        "threads": f"at most {resources.threads} a block",
        "registers": f"{resources.registers} a thread at launch, then {by_role}",
        "shared memory": f"{plan.shared_bytes / 1024:.0f} KiB a block",
        "stack and local": f"{local} bytes a thread",
    }
    if counts is None:
        rows["SASS"] = "no nvdisasm here (pip install nvidia-cuda-nvdisasm), so nothing is counted"
    else:
        rows["spills"] = f"{counts.local_accesses} instructions on local memory"
        rows["SASS"] = (
            f"{counts.total} instructions: {counts.products} matrix products, {counts.exp2} exp2, "
            f"{counts.tma} TMA"
        )
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    return table
