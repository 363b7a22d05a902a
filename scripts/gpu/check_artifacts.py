"""Load every artifact under a folder on this machine's GPU, run those that have a check, compare.

Needs torch, apache-tvm-ffi and CuTe-DSL's runtime library (FOVEA_RUNTIME_LIBRARY, or the wheel); no
compiler. Run from the repository's root:
    PYTHONPATH=src python scripts/gpu/check_artifacts.py FOLDER
A table comes last; the exit status is the number of artifacts that failed. An artifact whose name
has no check here is loaded only, and the table says so.
"""

import argparse
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fovea.compile.artifact import RECORD, Artifact, read_artifact
from fovea.runtime import module

Launcher = Callable[..., Any]


def check_toy_add(run: Launcher, device: torch.device) -> str:
    """Check out = a + alpha * b: sizes, streams, graphs, devices, errors, speed."""
    for length in (1, 127, 128, 129, 1_000_003):
        a, b = torch.randn(2, length, device=device)
        out = torch.full_like(a, torch.nan)
        run(a, b, out, -0.75)
        # The kernel rounds once, the double sum is rounded twice: they may differ by an ulp.
        expected = (a.double() - 0.75 * b.double()).float()
        torch.testing.assert_close(out, expected, rtol=1.2e-7, atol=0.0)
    _check_stream(run, device)
    _check_thread(run, device)
    _check_graph(run, device)
    _check_errors(run, device)
    notes = [_other_devices(run, device), f"{_microseconds_per_call(run, device):.1f} us a call"]
    return ", ".join(n for n in notes if n)


def _check_stream(run: Launcher, device: torch.device) -> None:
    """The launch must wait for work that was put on the current stream before it."""
    stream = torch.cuda.Stream(device)
    a = torch.zeros(1 << 20, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch on another stream would overtake it
        a.fill_(1.0)
        run(a, b, out, 2.0)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 3.0)), "the launch ignored the current stream"


def _check_thread(run: Launcher, device: torch.device) -> None:
    """Launch from a thread that never chose a device, as backward does."""
    a, b = torch.randn(2, 4096, device=device)
    out = torch.empty_like(a)
    failures: list[BaseException] = []

    def launch() -> None:
        try:
            run(a, b, out, 1.0)
            torch.cuda.synchronize(device)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not failures, failures
    assert torch.equal(out, a + b), "a launch from another thread gave other numbers"


def _check_graph(run: Launcher, device: torch.device) -> None:
    a, b = torch.randn(2, 4096, device=device)
    out = torch.empty_like(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        run(a, b, out, 1.0)
    a.normal_()
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(out, a + b), "a replayed graph gave other numbers"


def _check_errors(run: Launcher, device: torch.device) -> None:
    good = torch.zeros(8, device=device)
    wrong: dict[str, tuple[Any, ...]] = {
        "dtype": (good.half(), good, good, 1.0),
        "device": (good.cpu(), good, good, 1.0),
        "rank": (good.view(2, 4), good, good, 1.0),
        "length": (good[:4].clone(), good, good, 1.0),
        "count": (good, good, good),
    }
    for what, arguments in wrong.items():
        try:
            run(*arguments)
        except (TypeError, ValueError, RuntimeError):
            continue
        raise AssertionError(f"a wrong {what} was not refused")


def _other_devices(run: Launcher, device: torch.device) -> str:
    """Run on every other visible device while `device` is current."""
    notes: list[str] = []
    with torch.cuda.device(device):
        for index in range(torch.cuda.device_count()):
            other = torch.device("cuda", index)
            if other == device:
                continue
            a, b = torch.randn(2, 1000, device=other)
            out = torch.empty_like(a)
            run(a, b, out, 1.0)
            assert torch.equal(out, a + b), f"wrong numbers on {other}"
            assert torch.cuda.current_device() == device.index, "the current device was changed"
            notes.append(f"{other} right too")
    return ", ".join(notes)


def _microseconds_per_call(run: Launcher, device: torch.device) -> float:
    a, b = torch.zeros(2, 128, device=device)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(500):
            run(a, b, a, 0.0)
        best = min(best, (time.perf_counter() - start) / 500)
    torch.cuda.synchronize(device)
    return best * 1e6


CHECKS: dict[str, Callable[[Launcher, torch.device], str]] = {"toy_add": check_toy_add}


def devices_started() -> list[int]:
    """Return the devices on which this process has started CUDA; asking starts none."""
    driver = ctypes.CDLL("libcuda.so.1")
    started: list[int] = []
    for index in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        status = driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
        assert status == 0, f"cuDevicePrimaryCtxGetState: CUDA error {status}"
        if active.value:
            started.append(index)
    return started


def first_launch(artifact: Artifact, device: torch.device) -> str:
    """Launch once on one device; return on which devices that started CUDA.

    The launcher loads its kernel for all visible devices. If that started CUDA on the others, each
    process of a multi-GPU job would take some hundred MiB of every GPU.
    """
    run = module.load(artifact, device)
    a = torch.ones(128, device=device)
    before = devices_started()
    run(a, a, a, 1.0)
    torch.cuda.synchronize(device)
    return f"{before} before the first launch, {devices_started()} after it"


def check(artifact: Artifact, device: torch.device) -> tuple[str, str]:
    """Load and check one artifact; return its state and what to say about it."""
    start = time.perf_counter()
    run = module.load(artifact, device)
    loaded = f"opened in {(time.perf_counter() - start) * 1e3:.0f} ms"
    checker = CHECKS.get(artifact.record.name)
    if checker is None:
        return "loaded", f"{loaded}; no check of this name, not run"
    return "right", f"{loaded}, {checker(run, device)}"


def main() -> int:
    """Check all artifacts; return how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device here, or a CPU build of torch: nothing can be checked\n")
        return 1
    device = torch.device("cuda", options.device)
    torch.manual_seed(0)
    rows: list[tuple[str, str, str]] = []
    paths = sorted(options.folder.rglob(RECORD))
    toys = [a for a in (read_artifact(p.parent) for p in paths) if a.record.name == "toy_add"]
    started = first_launch(toys[0], device) if toys else "no toy to ask with"
    for path in paths:
        name = str(path.parent.relative_to(options.folder))
        try:
            rows.append((name, *check(read_artifact(path.parent), device)))
        except Exception as error:
            traceback.print_exc()
            rows.append((name, "WRONG", str(error).strip().splitlines()[0]))
    sys.stdout.write(
        f"\n{torch.cuda.get_device_name(device)}, torch {torch.__version__}, runtime library "
        f"{module.runtime_library()}\ndevices with CUDA started: {started}\n"
    )
    for name, state, note in rows:
        sys.stdout.write(f"{state}  {name}: {note}\n")
    if not rows:
        sys.stdout.write(f"no artifact under {options.folder}\n")
        return 1
    return sum(state == "WRONG" for _, state, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
