"""Time create_block_mask: fovea's beside torch's, with peak memory.

    python -m benchmarks.bench_block_mask                     # on the CPU, about a minute
    python -m benchmarks.bench_block_mask --device cuda
    python -m benchmarks.bench_block_mask --length 1048576 --mask document

From the repository's root, with `src` and `.` on PYTHONPATH. Each case runs in a process of its
own, so that its peak memory is its own: resident memory on a CPU, torch's allocator on a GPU.
torch materialises the dense mask, so it runs up to `--torch-length` only. Writes block_mask.json,
in positions (query, key) settled a second.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import protocol

# Masks with structure in positions, in captured tensors, and (dense) with none at all.
NAMES = ("causal", "window", "document", "natten", "dense")


def make_mask(name: str, length: int, device: str) -> Callable[..., Any]:
    """Return a mask_mod with what it captures on `device`."""
    if name == "causal":
        return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    if name == "window":
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 4096)
    generator = torch.Generator().manual_seed(0)
    if name == "document":
        starts = torch.randint(1, length, (length // 1024,), generator=generator).sort().values
        ids = torch.bucketize(torch.arange(length), starts, right=True).to(device)
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])
    if name == "natten":
        width, half = int(length**0.5), 6

        def natten(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            x = (q_idx // width).clamp(half, width - 1 - half) - kv_idx // width
            y = (q_idx % width).clamp(half, width - 1 - half) - kv_idx % width
            return (x.abs() <= half) & (y.abs() <= half)

        return natten
    hashes = torch.randint(0, 1 << 30, (length,), generator=generator).to(device)
    return lambda b, h, q_idx, kv_idx: (hashes[q_idx] ^ hashes[kv_idx]) % 65536 == 0


def run_case(name: str, length: int, device: str, implementation: str) -> dict[str, float]:
    """Return seconds, peak bytes and block counts of one build, in this process."""
    if implementation == "torch":
        from torch.nn.attention.flex_attention import create_block_mask
    else:
        from fovea.tiling.block_mask import create_block_mask
    mask_mod = make_mask(name, length, device)
    # A first build pays for imports and kernels; it is small.
    create_block_mask(make_mask(name, 256, device), None, None, 256, 256, device=device)
    before = peak_bytes(device)
    begin = time.monotonic()
    mask = create_block_mask(mask_mod, None, None, length, length, device=device)
    counts = (int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum()))
    seconds = time.monotonic() - begin
    return {
        "seconds": seconds,
        "added_bytes": peak_bytes(device) - before,
        "partial": counts[0],
        "full": counts[1],
    }


def peak_bytes(device: str) -> int:
    """Return the peak of resident memory, or of torch's allocator on a GPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(*case: str) -> dict[str, float]:
    """Return `run_case` of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_block_mask", "--run", *case],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"case {' '.join(case)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Run the benchmark as the command line says."""
    options = parse()
    if options.run:
        name, length, device, implementation = options.run
        print(json.dumps(run_case(name, int(length), device, implementation)))
        return
    rows: list[dict[str, Any]] = []
    for length in options.length:
        for name in options.mask:
            if name == "dense" and length > options.torch_length:
                continue
            row: dict[str, Any] = {"mask": name, "S": length, "device": options.device}
            for implementation in ("fovea", "torch"):
                if implementation == "torch" and length > options.torch_length:
                    continue
                case = (name, str(length), options.device, implementation)
                found = in_own_process(*case)
                row[implementation] = round(length * length / found["seconds"])
                row[f"{implementation}_seconds"] = round(found["seconds"], 3)
                row[f"{implementation}_added_gb"] = round(found["added_bytes"] / 1e9, 3)
                counts = {"partial": found["partial"], "full": found["full"]}
                if any(row.setdefault(key, value) != value for key, value in counts.items()):
                    sys.exit(f"{name} at {length}: fovea and torch disagree on the blocks")
            rows.append(row)
            print(line(row), flush=True)
    path = write(options, rows)
    print(f"wrote {path}")


def line(row: dict[str, Any]) -> str:
    """Return a row for the screen."""
    text = f"{row['mask']:9} {row['S']:8}"
    for name in ("fovea", "torch"):
        if name in row:
            seconds, added = row[f"{name}_seconds"], row[f"{name}_added_gb"]
            text += f"  {name} {seconds:8.3f} s {added:6.2f} GB"
    return text


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Path:
    """Write the result file and return its path."""
    if options.device.startswith("cuda"):
        path = protocol.result_path("block_mask", options.out)
        protocol.write_result(path, protocol.stamp(protocol.Board()), "positions/s", rows)
        return path
    path = Path(options.out) if options.out else protocol.RESULTS / "cpu" / "block_mask.json"
    stamp = {
        "gpu": None,
        "power_limit_watts": None,
        "driver": None,
        "torch": torch.__version__,
        "cuda": None,
        "cpu": protocol.cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": protocol.commit(),
        "date": date.today().isoformat(),
        "command": protocol.command(),
    }
    protocol.write_result(path, stamp, "positions/s", rows)
    return path


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, action="append", help="repeatable")
    parser.add_argument("--mask", action="append", choices=NAMES, help="repeatable; default: all")
    parser.add_argument("--torch-length", type=int, default=8192, help="longest that torch builds")
    parser.add_argument("--out", help="result file (default: benchmarks/results/<gpu or cpu>/)")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.length = options.length or [8192, 65536, 1 << 20]
    options.mask = options.mask or list(NAMES)
    return options


if __name__ == "__main__":
    main()
