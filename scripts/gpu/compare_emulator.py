"""Compare the sm_90a forward on an H200 with the same kernels on the emulator, bit by bit.

Three steps, from the repository's root:
    PYTHONPATH=src python scripts/gpu/compare_emulator.py bundle .carry/emulator      here
    FOVEA_BUNDLE=.carry/emulator python3 scripts/gpu/compare_emulator.py record FOLDER   on the GPU
    PYTHONPATH=src python scripts/gpu/compare_emulator.py compare FOLDER/outputs.npz  here
The last step runs every case in the emulator's exact and fast mode, prints a table, writes
`benchmarks/results/h200/emulator.json`, and fails if a mode misses its bounds: 99.9 % of the
elements within one bf16 ulp, the rest within 2^-8 of the row's largest |o|.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from call import Call
from cases import case_named

from benchmarks import protocol
from fovea.arch import arch_named
from fovea.problem import ForwardResult

# A few of tests/gpu/cases.py, at their small size.
CASES = (
    "one key",
    "zero q",
    "scale zero",
    "dense",
    "dense d64",
    "dense fp16",
    "dense d256",
    "causal",
    "causal d64",
    "window",
    "softcap",
    "sink",
    "alibi",
    "causal alibi d64 fp16",
    "document mask",
    "ranges document d64",
    "bits neighbours",
    "whole tiles",
    "long",
    "rising 300",
)
# Where MUFU cannot intervene the exact mode has to be equal in every bit: the exponential of 0 and
# the reciprocal of 1 are exact. In "zero q" and "scale zero" MUFU still gives 1/l of other sums l.
BIT_EQUAL = CASES[:1]
ARCH = arch_named("sm90")
WITHIN_SHARE, ROW_BOUND = 0.999, 2.0**-8


def build(name: str, device: str) -> Call:
    """Return a case's tensors and options."""
    return case_named(name).build(device, is_small=True)


def make_bundle(folder: Path) -> None:
    """Compile the kernels of all cases."""
    # Here and below: the GPU machine has neither the compiler nor what its cache needs.
    from fovea.api.variants import origins
    from fovea.compile.aot import write_bundle
    from fovea.compile.target import CompileTarget, native_host_triple
    from fovea.compile.variant import ForwardVariant
    from fovea.plan.select import forward_plan

    calls = (call for name in CASES for call, _ in origins(build(name, "cpu").problem(), ARCH))
    plans = dict.fromkeys(forward_plan(call, ARCH) for call in calls)
    target = CompileTarget(arch=ARCH.target, host_triple=native_host_triple())
    folder.parent.mkdir(parents=True, exist_ok=True)
    bundle = write_bundle([ForwardVariant(plan) for plan in plans], [target], folder, workers=2)
    sys.stdout.write(f"{folder}: {bundle.summary()}\n")


def record(folder: Path) -> None:
    """Run every case on the GPU; write inputs, outputs and the stamp."""
    from judge import run

    protocol.require_gpu()
    arrays: dict[str, np.ndarray] = {}
    for name in CASES:
        call = build(name, "cuda")
        result = run(call, "cuda")
        again = run(call, "cuda")
        assert torch.equal(_bits(result.out), _bits(again.out)), f"{name}: two runs differ"
        tensors = {"q": call.q, "k": call.k, "v": call.v, "out": result.out}
        arrays |= {f"{name}/{key}": _bits(t).numpy() for key, t in tensors.items()}
        arrays[f"{name}/lse"] = result.lse.cpu().numpy()
        sys.stdout.write(f"{name}: recorded\n")
    stamp = protocol.stamp(protocol.Board())
    arrays["stamp"] = np.array(json.dumps(stamp))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "outputs.npz", **arrays)
    sys.stdout.write(f"{folder / 'outputs.npz'}: {json.dumps(stamp)}\n")


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(torch.int16)


def bf16_ulp(x: Tensor) -> Tensor:
    """Return the distance of neighbouring bf16 numbers at each element's size."""
    _, exponent = torch.frexp(x)  # x = m * 2^exponent with m in [0.5, 1), and bf16 has 8 bits
    return torch.ldexp(torch.ones_like(x), exponent - 8)


def measure(found: ForwardResult, bits: Tensor, lse: Tensor) -> dict[str, Any]:
    """Return how near the emulator's results are to the GPU's."""
    silicon = bits.view(found.out.dtype).double()
    error = (found.out.double() - silicon).abs()
    is_far = (error > bf16_ulp(silicon)) & (error > 0)
    is_finite = lse.isfinite()
    assert torch.equal(is_finite, found.lse.isfinite()), "other rows see no key"
    of_row = error / silicon.abs().amax(-1, keepdim=True)
    return {
        "elements": bits.numel(),
        "equal": (error == 0).double().mean().item(),
        "within_ulp": 1 - is_far.double().mean().item(),
        "worst_of_row": of_row[is_far].max().item() if is_far.any() else 0.0,
        "lse_difference": (found.lse - lse)[is_finite].abs().max().item(),
    }


def verdict(name: str, row: dict[str, Any]) -> str:
    """Return what is wrong with one comparison, or ok."""
    if name in BIT_EQUAL and row["equal"] < 1:
        return "not equal in every bit"
    if row["within_ulp"] < WITHIN_SHARE:
        return f"less than {WITHIN_SHARE} within one ulp"
    return "ok" if row["worst_of_row"] <= ROW_BOUND else "an element is off by more than 2^-8"


def compare(recorded: Path, out: Path, commit: str | None) -> int:
    """Emulate every case and compare; return how many rows miss their bounds."""
    from fovea.emulator import Options
    from fovea.runtime import emulated

    data = np.load(recorded)
    rows: list[dict[str, Any]] = []
    for name in CASES:
        tensors = {
            key: torch.from_numpy(data[f"{name}/{key}"]) for key in ("q", "k", "v", "out", "lse")
        }
        call = build(name, "cpu")
        q, k, v = (tensors[key].view(call.q.dtype) for key in "qkv")
        for drawn, sent in ((call.q, q), (call.k, k), (call.v, v)):
            assert torch.equal(_bits(drawn), _bits(sent)), f"{name}: other inputs on the GPU"
        for mode in ("exact", "fast"):
            start = time.perf_counter()
            options = Options(exact_mma=mode == "exact")
            found, _ = emulated.emulate(call.problem(), ARCH, options=options)
            shape = dict(zip("BSHD", call.q.shape)) | {"Hkv": k.shape[2], "Skv": k.shape[1]}
            row = {"case": name, **shape, "causal": bool(call.options.get("causal")), "mode": mode}
            row |= measure(found, tensors["out"], tensors["lse"])
            row |= {"seconds": round(time.perf_counter() - start, 1), "verdict": verdict(name, row)}
            rows.append(row)
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
    stamp = json.loads(str(data["stamp"]))
    stamp["command"] = "python scripts/gpu/compare_emulator.py record"
    stamp["commit"] = commit or stamp["commit"]
    stamp["emulator_commit"] = protocol.commit()
    protocol.write_result(out, stamp, "share of equal elements", rows)
    sys.stdout.write(f"{out} written\n")
    return sum(row["verdict"] != "ok" for row in rows)


def line(row: dict[str, Any]) -> str:
    """Return a row for the screen."""
    return (
        f"{row['case']:24} {row['mode']:6} equal {row['equal']:9.4%}  "
        f"within an ulp {row['within_ulp']:9.4%}  rest {row['worst_of_row']:.1e} of the row  "
        f"lse {row['lse_difference']:.1e}  {row['seconds']:5.1f} s  {row['verdict']}"
    )


def main() -> int:
    """Run the step asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("step", choices=("bundle", "record", "compare"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path, default=protocol.RESULTS / "h200" / "emulator.json")
    parser.add_argument("--commit", help="of the recorded kernels, if the recording has no git")
    options = parser.parse_args()
    if options.step == "bundle":
        make_bundle(options.path)
    elif options.step == "record":
        record(options.path)
    else:
        return compare(options.path, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
