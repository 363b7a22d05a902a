"""Run every GPU test case through backend="cuda" and compare with float64; no compiler needed.

On the GPU machine, in the repository's root:
    . .carry/setup.sh && FOVEA_BUNDLE=.carry/cases python3 scripts/gpu/run_cases.py [WORDS]
One line a case: its name, the largest error against float64, that of plain torch attention in the
same dtype, and the verdict. A case that hangs or loses the CUDA context is named, and the rest goes
on in a new process. The exit status is the number of cases that failed.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

STARTED, DONE, READY = "\x01", "\x02", "\x03"
_START_SECONDS = 120.0


def work(names: list[str], *, is_emulated: bool) -> None:
    """Run cases in this process, saying when each begins and ends."""
    import torch
    from cases import case_named
    from judge import judge, judge_gradients, run
    from special import CHECKS

    device, backend = ("cpu", "emulator:sm90") if is_emulated else ("cuda", "cuda")
    where = backend if is_emulated else torch.cuda.get_device_name()
    sys.stdout.write(f"{READY}{where}, torch {torch.__version__}\n")
    for name in names:
        sys.stdout.write(f"{STARTED}{name}\n")
        sys.stdout.flush()
        start = time.perf_counter()
        numbers = wrong = ""
        try:
            if name in CHECKS:
                numbers = CHECKS[name]()
            else:
                case = case_named(name)
                call = case.build(device, is_small=is_emulated)
                error, plain, found = judge(call, run(call, backend))
                numbers, wrong = f"error {error:.1e} plain {plain:.1e}", found or ""
                if case.checks_gradients and not wrong:
                    small = case.build(device, is_small=True)
                    wrong = judge_gradients(small, backend) or ""
            if not is_emulated:
                torch.cuda.synchronize()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        wrong = " / ".join(wrong.splitlines())[:300]
        seconds = time.perf_counter() - start
        verdict = f"FAIL {wrong}" if wrong else "ok"
        sys.stdout.write(f"{DONE}{name:28} {numbers:34} {seconds:5.2f} s  {verdict}\n")
        sys.stdout.flush()
        if not is_emulated:
            torch.cuda.empty_cache()
        if "CUDA error" in wrong or "cudaError" in wrong or "illegal" in wrong:
            return


def supervise(names: list[str], seconds: float, *, is_emulated: bool) -> int:
    """Run cases in worker processes until each was tried; return how many failed."""
    left, failed = list(names), 0
    while left:
        flags = ["--worker", *(["--emulate"] if is_emulated else [])]
        command = [sys.executable, "-u", __file__, *flags, *left]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: Queue[str | None] = Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        running, patience, tried = None, _START_SECONDS, 0
        while True:
            try:
                line = lines.get(timeout=patience)
            except Empty:
                process.kill()
                line = None
            if line is None:
                break
            if line[0] == STARTED:
                running, patience = line[1:].rstrip(), seconds
            elif line[0] == DONE:
                tried, running = tried + 1, None
                failed += " FAIL " in line
                sys.stdout.write(line[1:])
            else:
                sys.stdout.write(line.lstrip(READY))
            sys.stdout.flush()
        status = process.wait()
        if running is not None:
            tried, failed = tried + 1, failed + 1
            how = f"hung for {seconds:.0f} s" if status < 0 else f"died with status {status}"
            sys.stdout.write(f"{running:28} FAIL {how}\n")
        if tried == 0:
            sys.stdout.write(f"no case could be started (status {status})\n")
            return failed + len(left)
        left = left[tried:]
    return failed


def _read(process: "subprocess.Popen[str]", lines: "Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def main() -> int:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="run cases whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=30.0, help="patience with one case")
    parser.add_argument(
        "--emulate", action="store_true", help="small sizes on the CPU, backend emulator:sm90"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.names, is_emulated=options.emulate)
        return 0
    from cases import CASES
    from special import CHECKS

    names = [case.name for case in CASES]
    if not options.emulate:
        names += CHECKS
    if options.names:
        names = [name for name in names if any(word in name for word in options.names)]
    start = time.perf_counter()
    failed = supervise(names, options.seconds, is_emulated=options.emulate)
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{len(names) - failed} of {len(names)} cases right, {seconds:.0f} s\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
