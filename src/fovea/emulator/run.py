"""Load PTX, launch kernels, get results: the interface of the emulator.

Lives here: `load_ptx`, `Module.launch`, `Result`. Not here: the packing of arguments
(`launch_arguments.py`), the host launchers of CuTe-DSL (`driver.py`). Invariant: a launch either
returns a Result with every store done in the caller's arrays, or raises an EmulatorError.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from fovea.emulator.arguments import check_kind, check_text, listed, wrong
from fovea.emulator.errors import LaunchError
from fovea.emulator.isa.instruction import Array
from fovea.emulator.junk import run_past_junk
from fovea.emulator.launch_arguments import pack
from fovea.emulator.machine.grid import Machine, check_geometry
from fovea.emulator.machine.memory import CONST_WINDOW, GlobalMemory, Segment
from fovea.emulator.memory_order import Places
from fovea.emulator.options import Options
from fovea.emulator.ptx.module import Kernel, Layout
from fovea.emulator.schedule import Scheduler
from fovea.emulator.trace import Trace

Dim = int | Sequence[int]

SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99}  # KiB a CTA
SHARED_LIMIT_DEFAULT = 227  # KiB: sm_90, sm_100 and relatives (CUDA guide, compute capabilities)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """What a launch did, besides the stores in the caller's arrays.

    Attributes:
        kernel: name of the kernel.
        counters: sums over all warps, e.g. `instructions.alu`, `mufu.ex2`, `mma_flops.bf16`,
            `waited_steps.<barrier>` (scheduler steps, not time).
        counters_by_warp: the same by (CTA index, warp).
        steps: scheduler steps taken.
        lines: PTX lines that some warp got to (a guard may have left out every lane).
        printed: lines printed by the kernel.
        warnings: what is doubtful but no fault, e.g. an exit while a bulk store is not waited for.
    """

    kernel: str
    counters: Mapping[str, int]
    counters_by_warp: Mapping[tuple[tuple[int, int, int], int], Mapping[str, int]]
    steps: int
    lines: frozenset[int] = frozenset()
    printed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    trace: Trace | None = None

    def __repr__(self) -> str:
        """Return name and sizes: the counters of a launch fill pages."""
        parts = [f"kernel={self.kernel!r}", f"steps={self.steps}"]
        parts += [f"<{len(self.counters)} counters of {len(self.counters_by_warp)} warps>"]
        parts += [f"<{len(self.printed)} lines printed>"] if self.printed else []
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        return f"Result({', '.join(parts)})"

    def write_trace(self, path: str | Path) -> None:
        """Write the launch as Perfetto JSON (needs `Options(trace=True)`)."""
        if self.trace is None:
            raise LaunchError(
                "the launch collected no trace; launch with options=emulator.Options(trace=True)"
            )
        check_kind("path", path, (str, Path), "a str or a Path", "name the file to write")
        file = Path(path)
        try:
            is_place = file.absolute().parent.is_dir() and not file.is_dir()
            if is_place:
                self.trace.write(file)
        except (OSError, ValueError) as error:  # ValueError: a character that no path has
            remedy = "name a file that can be written"
            raise wrong("path", str(path), f"a file to write; {error}", remedy) from error
        if not is_place:
            remedy = "make the folder first, or name a file elsewhere"
            raise wrong("path", str(path), "a file in a folder that exists", remedy)


class Module:
    """Parsed PTX with its global variables."""

    def __init__(self, text: str):
        self._layout = Layout.of(text)

    def __repr__(self) -> str:
        """Return target, kernels with their parameters, and variables."""
        functions = self._layout.tree.functions
        kernels = [
            f"{name}({', '.join(f'.{p.type} {p.name}' for p in functions[name].parameters)})"
            for name in self.kernels
        ]
        text = f"Module for {self.target}: kernels {listed(kernels)}"
        names = [*self._layout.global_arrays]
        return f"<{text}; variables {listed(names)}>" if names else f"<{text}>"

    @property
    def target(self) -> str:
        """The `.target` of the text, e.g. "sm_90a"."""
        return self._layout.tree.target

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels of the module."""
        functions = self._layout.tree.functions.values()
        return tuple(f.name for f in functions if f.is_entry and f.is_defined)

    def parameter_sizes(self, kernel: str) -> tuple[int, ...]:
        """Return the size in bytes of each parameter of a kernel."""
        return tuple(p.size for p in self._layout.kernel(kernel).parameters)

    def global_variable(self, name: str) -> Array:
        """Return the bytes of a `.global` variable; writing them changes the variable.

        Raises:
            LaunchError: the module has no such variable.
        """
        found = self._layout.global_arrays
        check_kind("name", name, str, "the name of a .global variable", "see the PTX")
        if name not in found:
            allowed = ", ".join(found) or "none: the module has no .global variable"
            raise wrong("name", name, allowed, "name a .global variable of the module")
        return found[name]

    def launch(
        self,
        kernel: str,
        grid: Dim,
        block: Dim,
        cluster: Dim = 1,
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        options: Options | None = None,
        *,
        memory: GlobalMemory | None = None,
    ) -> Result:
        """Run one kernel.

        Args:
            kernel: its name.
            grid: CTAs along x, y, z (or just x).
            block: threads along x, y, z.
            cluster: CTAs of a cluster along x, y, z.
            args: one value per parameter: a numpy array or CPU tensor (its address is passed,
                its bytes become accessible), an int or float, a numpy scalar, or `bytes` of the
                parameter's size.
            shared_bytes: dynamic shared memory.
            options: see `Options`.
            memory: further memory that pointers inside `bytes` parameters lead to.

        Raises:
            LaunchError: what no GPU would accept.
            PtxError: an instruction is wrong or not implemented.
            Fault: the kernel did something wrong.
        """
        options = _checked(options)
        found = self._layout.kernel(kernel, options.tensor_load_wait)
        grid_shape, block_shape = _three("grid", grid), _three("block", block)
        cluster_shape = _three("cluster", cluster)
        if cluster_shape == (1, 1, 1) and found.required_cluster:
            cluster_shape = _three("cluster", found.required_cluster)
        check_geometry(grid_shape, block_shape, cluster_shape)
        _check_kernel_geometry(found, block_shape, cluster_shape)
        memory = GlobalMemory() if memory is None else memory
        check_kind(
            "memory", memory, GlobalMemory, "an emulator.GlobalMemory or None",
            "memory = emulator.GlobalMemory(); memory.register(array, name)",
        )  # fmt: skip
        parameters = pack(found, args, memory)
        total = self._total_shared(found, shared_bytes)
        for name, array in self._layout.global_arrays.items():
            memory.register_bytes(array, array.ctypes.data, f"variable {name}")

        def attempt(junk: int | None) -> Result:
            machine = Machine(
                found.program,
                memory,
                options,
                grid_shape,
                block_shape,
                cluster_shape,
                parameters,
                total,
            )
            machine.junk = junk
            return self._run(machine)

        return run_past_junk(attempt, memory)

    def _run(self, machine: Machine) -> Result:
        machine.constants = Segment(
            "the constant bank", "const", self._layout.constants, CONST_WINDOW
        )
        if machine.options.trace:
            machine.trace = Trace()
        if machine.options.detect_races:
            machine.global_races.watch(machine.memory.segments)
        try:
            with np.errstate(all="ignore"):
                Scheduler(machine).run()
        finally:
            for segment in machine.memory.segments:
                segment.shadow = None
                segment.places = Places()
        return Result(
            kernel=machine.program.kernel,
            counters=dict(machine.counters.sums),
            counters_by_warp=machine.counters.by_warp,
            steps=machine.step,
            lines=machine.counters.lines,
            printed=tuple(machine.printed),
            warnings=tuple(machine.warnings),
            trace=machine.trace,
        )

    def _total_shared(self, kernel: Kernel, dynamic: int) -> int:
        if not isinstance(dynamic, int) or isinstance(dynamic, bool) or dynamic < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "leave it out if the kernel has no extern .shared array"
            raise wrong("shared_bytes", dynamic, "an int of 0 or more", remedy)
        total = kernel.static_bytes + dynamic
        limit = SHARED_LIMIT.get(self.target.rstrip("af"), SHARED_LIMIT_DEFAULT) * 1024
        if total > limit:
            raise LaunchError(
                f"shared_bytes={dynamic} and {kernel.static_bytes} static bytes exceed the "
                f"{limit} bytes a CTA may have on {self.target} (allowed: 0 to "
                f"{max(limit - kernel.static_bytes, 0)}); take fewer"
            )
        return total


def _checked(options: Options | None) -> Options:
    options = Options() if options is None else options
    remedy = "write options=emulator.Options(seed=1)"
    check_kind("options", options, Options, "an emulator.Options or None", remedy)
    return options


def load_ptx(text: str) -> Module:
    """Parse a PTX text. The instructions of a kernel are looked at when it is first launched.

    Raises:
        LaunchError: it is no text, or the path of a file.
        PtxError: with the line of the first thing whose syntax is wrong.
    """
    check_text("text", text, "the PTX text", "pass Path(file).read_text()", has=".version")
    return Module(text)


def _three(name: str, dim: Any) -> tuple[int, int, int]:
    try:
        sizes = cast(Iterable[Any], dim) if isinstance(dim, Iterable) else (dim,)
        values = [operator.index(size) for size in sizes]
    except TypeError:
        values = []
    if not 1 <= len(values) <= 3:
        remedy = f"write {name}=4 or {name}=(4, 1, 1)"
        raise wrong(name, cast(object, dim), "an int or a list of one to three ints", remedy)
    padded = (*values, 1, 1)
    return padded[0], padded[1], padded[2]


def _check_kernel_geometry(
    kernel: Kernel, block: tuple[int, int, int], cluster: tuple[int, int, int]
) -> None:
    required = kernel.required_block
    if required and block != _three("reqntid", required):
        raise LaunchError(
            f"block={block}, but kernel {kernel.name} has .reqntid {required}; pass "
            f"block={_three('reqntid', required)}"
        )
    limit = kernel.max_block
    if limit and math.prod(block) > math.prod(limit):
        raise LaunchError(
            f"block={block} exceeds .maxntid {limit} of kernel {kernel.name}; pass at most "
            f"{math.prod(limit)} threads"
        )
    wanted = kernel.required_cluster
    if wanted and cluster != _three("reqnctapercluster", wanted):
        raise LaunchError(
            f"cluster={cluster}, but {kernel.name} has .reqnctapercluster {wanted}; leave cluster "
            "out"
        )
