"""A PTX emulator on the CPU: load PTX, launch kernels, get results or a precise report.

It knows nothing of attention or torch. See README.md beside this file.
"""

from typing import Any

from fovea.emulator.errors import (
    DeadlockError,
    EmulatorError,
    Fault,
    IllegalOperand,
    LauncherError,
    LaunchError,
    Misaligned,
    OperandTypeError,
    OutOfBounds,
    PtxError,
    RaceError,
    StepLimitExceeded,
    Trap,
    UninitialisedRead,
    UnsupportedForm,
)
from fovea.emulator.options import Options
from fovea.errors import missing_package

try:
    from fovea.emulator.layout.tensor_map import encode_tensor_map, make_tensor_map
    from fovea.emulator.machine.memory import GlobalMemory
    from fovea.emulator.run import Module, Result, load_ptx
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "numpy":
        raise
    raise ModuleNotFoundError(
        missing_package("fovea.emulator", "numpy", "emulator"), name="numpy"
    ) from error

__all__ = [
    "DeadlockError",
    "EmulatorError",
    "Fault",
    "GlobalMemory",
    "IllegalOperand",
    "LaunchError",
    "LauncherError",
    "Misaligned",
    "Module",
    "OperandTypeError",
    "Options",
    "OutOfBounds",
    "PtxError",
    "RaceError",
    "Result",
    "StepLimitExceeded",
    "Trap",
    "UninitialisedRead",
    "UnsupportedForm",
    "encode_tensor_map",
    "load_launcher",
    "load_ptx",
    "make_tensor_map",
]


def load_launcher(*args: Any, **keywords: Any) -> Any:
    """Run a CuTe-DSL host launcher in the emulator; see `driver.load_launcher`.

    It is imported on first use, because it needs llvmlite.
    """
    from fovea.emulator import driver

    return driver.load_launcher(*args, **keywords)
