"""Record what silicon makes of the single-instruction cases.

Runs every case of `case_forms.py` on the first CUDA device through the driver
(no CUDA toolkit needed) and writes the raw outputs as `<out>/isa_outputs.npz`: for each case the
results of the first 32 threads that `cases/*.ptx` keep, and of a larger random batch.
Usage, on a machine with a GPU: python scripts/isa_cases/record.py OUT_FOLDER
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
from case_forms import every_case
from case_table import inputs_of, render

FUZZ_THREADS = 2048


class Driver:
    """The few calls of the CUDA driver that a launch needs."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(96), ctypes.c_int()
        self.call("cuDeviceGetName", name, 96, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.stamp = {"gpu": name.value.decode(), "cuda": version.value}

    def call(self, name: str, *args: object) -> None:
        """Call a driver function; raise on an error code."""
        code = getattr(self._cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def run(self, ptx: str, inputs: np.ndarray, outputs: int) -> np.ndarray:
        """Run a case on as many threads as `inputs` has rows, 32 a block."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"case")
        result = np.zeros((len(inputs), outputs), np.uint64)
        source, target = ctypes.c_uint64(), ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(inputs.nbytes))
        self.call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(result.nbytes))
        host = np.ascontiguousarray(inputs)
        self.call("cuMemcpyHtoD_v2", source, ctypes.c_void_p(host.ctypes.data),
                  ctypes.c_size_t(host.nbytes))  # fmt: skip
        args = (ctypes.c_void_p * 2)(ctypes.addressof(source), ctypes.addressof(target))
        self.call(
            "cuLaunchKernel", function, len(inputs) // 32, 1, 1, 32, 1, 1, 0, None, args, None
        )
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(result.ctypes.data), target,
                  ctypes.c_size_t(result.nbytes))  # fmt: skip
        self.call("cuMemFree_v2", source)
        self.call("cuMemFree_v2", target)
        self.call("cuModuleUnload", module)
        return result


def main(folder: Path) -> None:
    """Run every case and write the outputs."""
    driver = Driver()
    arrays: dict[str, np.ndarray] = {}
    failed: dict[str, str] = {}
    for number, case in enumerate(every_case()):
        try:
            for label, threads, seed in (("case", 32, 0), ("fuzz", FUZZ_THREADS, 1)):
                arrays[f"{label}{number}"] = driver.run(
                    render(case), inputs_of(case, threads, seed), len(case.outputs)
                )
        except RuntimeError as error:
            failed[case.name] = str(error)
    driver_version = Path("/proc/driver/nvidia/version")
    if driver_version.exists():
        driver.stamp["driver"] = driver_version.read_text().split("\n")[0]
    np.savez_compressed(folder / "isa_outputs.npz", **arrays)
    (folder / "isa_stamp.json").write_text(json.dumps({"stamp": driver.stamp, "failed": failed}))
    sys.stdout.write(json.dumps({"stamp": driver.stamp, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
