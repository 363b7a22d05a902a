"""Record what silicon makes of the block cases, from their files.

Runs every file of `tests/emulator/isa/cases/blocks` whose target the GPU has, through the driver
(no CUDA toolkit, no torch), compares with the file, and writes the outputs as
`<out>/block_outputs.npz`. A case that hangs or faults is named, and the rest goes on in a new
process. The exit status is the number of cases that failed or differ.
Usage, on a machine with a GPU: python scripts/isa_cases/record_blocks.py OUT_FOLDER
"""

import ctypes
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from block_table import SILICON_TARGETS, BlockFile, Tensor, read
from record import Driver

FOLDER = Path(__file__).parents[2] / "tests" / "emulator" / "isa" / "cases" / "blocks"
PATIENCE_SECONDS = 20
START_SECONDS = 120
# CUtensorMapDataType and CUtensorMapSwizzle of the driver API (cuda.h)
DRIVER_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8,
    "bf16": 9, "f32.ftz": 10, "tf32": 11, "tf32.ftz": 12,
}  # fmt: skip
SWIZZLES = (0, 32, 64, 128)


def files() -> list[Path]:
    """Return the files that silicon can run."""
    return [p for p in sorted(FOLDER.glob("*/*.ptx")) if read(p).target in SILICON_TARGETS]


class BlockDriver(Driver):
    """Runs block cases."""

    def run_block(self, case: BlockFile) -> np.ndarray:
        """Run one case; return `out`."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        text = case.text.encode() + b"\0"
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.value.decode()}") from error
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"case")
        source, target = self._upload(case.inputs), self._upload(case.before)
        cells: list[Any] = [source, target]
        if case.tensor is not None:
            cells.append(self.encode(case.tensor, source if case.tensor.over == "in" else target))
        pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        self.call(
            "cuLaunchKernel", function, case.cluster, 1, 1, case.threads, 1, 1, 0, None, pointers,
            None,
        )  # fmt: skip
        self.call("cuCtxSynchronize")
        out = np.zeros_like(case.expected)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), target,
                  ctypes.c_size_t(out.nbytes))  # fmt: skip
        for address in (source, target):
            self.call("cuMemFree_v2", address)
        self.call("cuModuleUnload", module)
        return out

    def _upload(self, data: np.ndarray) -> ctypes.c_uint64:
        address, size = ctypes.c_uint64(), ctypes.c_size_t(max(data.nbytes, 16))
        self.call("cuMemAlloc_v2", ctypes.byref(address), size)
        host = np.ascontiguousarray(data)
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(host.ctypes.data),
                  ctypes.c_size_t(host.nbytes))  # fmt: skip
        return address

    def encode(self, tensor: Tensor, address: ctypes.c_uint64) -> Any:
        """Return the driver's map as a 64-byte aligned buffer."""
        rank = len(tensor.sizes)
        storage = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(storage) % 64
        view = (ctypes.c_char * 128).from_buffer(storage, start)
        steps = tensor.element_strides or (1,) * rank
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(ctypes.addressof(view)),
            DRIVER_TYPES[tensor.element],
            rank,
            ctypes.c_void_p(address.value),
            (ctypes.c_uint64 * rank)(*tensor.sizes),
            (ctypes.c_uint64 * max(rank - 1, 1))(*tensor.strides),
            (ctypes.c_uint32 * rank)(*tensor.box),
            (ctypes.c_uint32 * rank)(*steps),
            0,  # no interleaving
            SWIZZLES.index(tensor.swizzle),
            0,  # no promotion in L2
            int(tensor.fills_nan),
        )
        return view


def work(pipe: Connection) -> None:
    """Run the cases that the pipe names, until it says stop."""
    driver = BlockDriver()
    pipe.send(driver.stamp)
    while (name := pipe.recv()) is not None:
        try:
            pipe.send(driver.run_block(read(FOLDER / name)))
        except RuntimeError as error:
            pipe.send(str(error))


def start() -> tuple[Any, Any, dict[str, Any]]:
    """Start a worker; return it, its pipe, and what GPU it has."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(there,), daemon=True)
    process.start()
    if not here.poll(START_SECONDS):
        sys.exit("the worker found no GPU")
    return process, here, here.recv()


def main(folder: Path) -> int:
    """Run every case; write the outputs; return how many failed or differ."""
    outputs: dict[str, np.ndarray] = {}
    wrong = 0
    process, pipe, stamp = start()
    paths = files()
    for path in paths:
        name = str(path.relative_to(FOLDER))
        pipe.send(name)
        try:
            found = pipe.recv() if pipe.poll(PATIENCE_SECONDS) else "hung"
        except EOFError:
            found = "died"
        if isinstance(found, str):
            wrong += 1
            sys.stdout.write(f"{name}: FAILED: {found}\n")
            # an error of the GPU stays with the process
            process.kill()
            process, pipe, stamp = start()
            continue
        outputs[name] = found
        different = int((found != read(path).expected).sum())
        if different:
            wrong += 1
            sys.stdout.write(f"{name}: {different} of {found.size} words differ\n")
        sys.stdout.flush()
    pipe.send(None)
    driver_version = Path("/proc/driver/nvidia/version")
    if driver_version.exists():
        stamp["driver"] = driver_version.read_text().split("\n")[0]
    folder.mkdir(parents=True, exist_ok=True)
    packed: dict[str, Any] = {**outputs, "stamp": np.array(json.dumps(stamp))}
    np.savez_compressed(folder / "block_outputs.npz", **packed)
    sys.stdout.write(f"{len(paths) - wrong} of {len(paths)} as expected: {json.dumps(stamp)}\n")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
