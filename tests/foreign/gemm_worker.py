"""quack's matrix products on this CPU, their kernels on the emulator.

quack-kernels comes with flash-attn-4, which is built on it.
Usage: python gemm_worker.py FOLDER/request.json
Writes `<name>_results.npz` (a, b, c and an output for every seed) and `report.json`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulated_compiler import EmulatingCompiler, claim, emulate_compiler
from quack.gemm import gemm

from fovea import emulator


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Return the values as float32, which holds those of every smaller format."""
    return x.float().numpy()


def run(product: dict[str, Any], compiler: EmulatingCompiler, num_seeds: int) -> dict[str, Any]:
    """Run one product under every seed; return inputs and outputs."""
    rows, columns, depth = product["sizes"]
    dtype, out_dtype = (getattr(torch, product[name]) for name in ("dtype", "out_dtype"))
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, rows, depth, generator=generator).to(dtype)
    b = torch.randn(1, columns, depth, generator=generator).to(dtype)
    c = torch.randn(1, rows, columns, generator=generator).to(out_dtype)
    found = {"a": to_numpy(a[0]), "b": to_numpy(b[0]), "c": to_numpy(c[0])}
    for seed in range(num_seeds):
        compiler.options = emulator.Options(seed=seed)
        out = torch.zeros(1, rows, columns, dtype=out_dtype)
        tensors = [claim(a), claim(b), claim(out), claim(c) if product["adds_c"] else None, None]
        gemm(*tensors, *product["tile"], *product["cluster"], **product["options"])
        found[f"out_{seed}"] = to_numpy(out[0])
    return found


def main(path: Path) -> None:
    """Run the request."""
    torch.set_num_threads(1)
    request, folder = json.loads(path.read_text()), path.parent
    compiler = emulate_compiler(folder)
    report: dict[str, Any] = {}
    for name, product in request["products"].items():
        start, error = time.perf_counter(), ""
        try:
            np.savez(folder / f"{name}_results.npz", **run(product, compiler, request["seeds"]))
        except emulator.EmulatorError as fault:
            error = f"{type(fault).__name__}: {fault}"
        report[name] = {"error": error, "seconds": time.perf_counter() - start}
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
