"""CuTe-DSL packages on a CPU: their kernels compiled for real and run on the emulator.

Lives here: what a CPU lacks, filled in: `cute.compile` that returns emulated launchers, the answer
to occupancy queries, tensors that say that they are on a GPU. Not here: what is called (the
workers). Invariant: the packages themselves are unchanged. Importing this reads the compiler's
target from the environment, so only the workers do.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hardware_info as hardware
import torch
from cutlass import Numeric

from fovea import emulator

NUM_SMS = 132


class GpuClaim(torch.Tensor):
    """A CPU tensor that the package's checks take for one on a GPU."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True


class EmulatingCompiler:
    """Stands in for `cute.compile`: compiles for real, returns what runs on the emulator."""

    def __init__(self, folder: Path):
        self._compile = cute.compile
        self._folder = folder
        self.options = emulator.Options()
        self.seconds = 0.0
        self.kernels: list[str] = []
        self.warnings: set[str] = set()
        self.results: list[emulator.Result] = []  # of every launch

    def __call__(self, *arguments: Any, options: str = "", **keywords: Any) -> Any:
        start = time.perf_counter()
        number = len(self.kernels)
        options = f"{options} --keep-ptx --dump-dir {self._folder}"
        compiled = self._compile(*arguments, options=options, **keywords)
        path = self._folder / f"launcher{number}.o"
        compiled.export_to_c(str(path), function_name="foreign")
        ptx = compiled.artifacts.PTX.rstrip("\0")
        (self._folder / f"kernel{number}.ptx").write_text(ptx)
        launcher = emulator.load_launcher(path.read_bytes(), ptx)
        self.kernels.append(type(arguments[0]).__name__)
        self.seconds += time.perf_counter() - start

        def run(*values: Any) -> None:
            for result in launcher(*map(plain, values), options=self.options):
                self.warnings.update(result.warnings)
                self.results.append(result)

        return run

    @property
    def counters(self) -> list[Mapping[str, int]]:
        """Counters of every launch."""
        return [result.counters for result in self.results]


def plain(value: Any) -> Any:
    """Return the value as a launcher takes it, without the claim and the DSL's numbers."""
    if isinstance(value, GpuClaim):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, Numeric):
        return value.value
    return value


def answer_occupancy() -> None:
    """Give the answers that otherwise need a device."""
    info: Any = hardware.HardwareInfo
    info.__init__ = lambda self, *_, **__: None
    info.get_max_active_clusters = lambda self, cluster_size=1, **_: NUM_SMS // cluster_size
    info.get_device_multiprocessor_count = lambda self, **_: NUM_SMS


def claim(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one of the package's GPU."""
    return tensor.as_subclass(GpuClaim)


def emulate_compiler(folder: Path) -> EmulatingCompiler:
    """Put the stand-ins in place; kernels are kept in `folder`."""
    answer_occupancy()
    compiler = EmulatingCompiler(folder)
    cute.compile = compiler
    return compiler
