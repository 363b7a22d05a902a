"""How a time is taken on a GPU: interleaved peers, burst and steady state, energy.

Lives here: the measuring loop, NVML readings, the result file. Not here: which functions are
timed (`peers.py`) and on which shapes (`shapes.py`). Invariants: every implementation of a row
runs in the same process, in turns (A B A B); a rate comes from CUDA events, energy from the
GPU's own counter, read at the moments it advances; a result without its stamp is not written.

A burst is six launches after a pause of 0.6 s, at the clock of a cool GPU. The steady state is
what continuous work settles at: a segment runs one implementation without a gap, and the second
half of the segment counts. A matrix-bound kernel holds the board at its power limit. The limiter
swings for a second or two after a rest, so that what runs then draws up to a tenth more or less
than the limit: seconds of work come first that do not count, no rest lies between segments, and
every second round goes the other way.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Launch = Callable[[], Any]

RESULTS = Path(__file__).parent / "results"

_BURST_PAUSE_SECONDS = 0.6
_BURST_LAUNCHES = 6
# Launches between two events of a segment take about this long: long beside an event's
# resolution (0.5 us) and the CPU's work, short beside the 0.1 s in which clocks move.
_CHUNK_SECONDS = 0.03
_WARM_SECONDS = 2.0
_METER_SECONDS = 0.001  # between two looks at the counter of energy
_METER_PATIENCE_SECONDS = 1.0  # until a counter that does not advance is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Options of a run."""

    rounds: int = 2
    segment_seconds: float = 1.5
    has_burst: bool = True


@dataclass(slots=True)
class Samples:
    """Raw readings of one implementation on one shape."""

    burst_seconds: list[float] = field(default_factory=list[float])
    steady_seconds: list[float] = field(default_factory=list[float])
    clocks_mhz: list[int] = field(default_factory=list[int])
    watts: list[float] = field(default_factory=list[float])


class Board:
    """NVML readings of the GPU that torch calls device 0."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        # By UUID: NVML numbers the host's GPUs, torch those that CUDA_VISIBLE_DEVICES leaves.
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        try:
            self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        """Return the energy used since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000

    def meter(self) -> "Meter":
        """Return a meter of the power from now on."""
        return Meter(self.joules)

    def clock_mhz(self) -> int:
        """Return the SM clock now."""
        return self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)

    def power_limit_watts(self) -> float:
        """Return the enforced power limit."""
        return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000

    def driver(self) -> str:
        """Return the driver's version."""
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version


class Meter:
    """The power of the board from now on.

    The counter of energy advances about ten times a second. A thread notes when it does, so
    that energy and time belong to the same span.
    """

    def __init__(self, joules: Callable[[], float]) -> None:
        """Begin."""
        self._joules = joules
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._steps: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before = self._joules()
        while not self._ended.wait(_METER_SECONDS):
            joules = self._joules()
            if joules != before:
                self._steps.append((time.monotonic(), joules))
                before = joules

    def is_ready(self) -> bool:
        """Return whether the counter has advanced twice, or has had ample time to."""
        is_late = time.monotonic() - self._begin > _METER_PATIENCE_SECONDS
        return len(self._steps) > 1 or is_late

    def watts(self) -> float:
        """End, and return the mean power; NaN where the counter advanced once or never."""
        self._ended.set()
        self._thread.join()
        if len(self._steps) < 2:
            return math.nan
        (start, first), (end, last) = self._steps[0], self._steps[-1]
        return (last - first) / (end - start)


def require_gpu() -> None:
    """Exit with a message where there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit(
            "this benchmark needs a CUDA device and found none; `fovea bench` times the reference "
            "on a CPU."
        )


def measure(launches: Mapping[str, Launch], board: Board, timing: Timing) -> dict[str, Samples]:
    """Return readings of every implementation, taken in turns.

    Units:
        seconds per launch.
    """
    samples = {name: Samples() for name in launches}
    chunk = {}
    for name, launch in launches.items():
        for _ in range(3):
            launch()
        chunk[name] = max(1, round(_CHUNK_SECONDS / _seconds(launch, 3)))
    names = list(launches)
    if timing.has_burst:
        for _ in range(timing.rounds):
            for name in names:
                samples[name].burst_seconds.append(_burst(launches[name]))
    # From rest to the power limit, and until the limiter has stopped swinging, nothing counts.
    _steady(launches[names[0]], chunk[names[0]], board, _WARM_SECONDS, Samples())
    for _ in range(timing.rounds):
        for name in names:
            _steady(launches[name], chunk[name], board, timing.segment_seconds, samples[name])
        names.reverse()
    return samples


def _seconds(launch: Launch, count: int) -> float:
    """Return the time of one launch out of `count` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def _burst(launch: Launch) -> float:
    """Return the median time of six launches on a rested GPU."""
    torch.cuda.synchronize()
    time.sleep(_BURST_PAUSE_SECONDS)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_BURST_LAUNCHES + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1000 for a, b in pairwise(events))


def _steady(launch: Launch, chunk: int, board: Board, seconds: float, into: Samples) -> None:
    """Run `launch` without a gap for `seconds`; add readings of the second half to `into`."""
    flying: deque[torch.cuda.Event] = deque()
    begin = time.monotonic()
    meter: Meter | None = None
    last = torch.cuda.Event(enable_timing=True)
    last.record()
    is_counted = False
    chunk_seconds: list[float] = []
    while (
        (now := time.monotonic()) - begin < seconds
        or len(chunk_seconds) < 2
        or not (meter is not None and meter.is_ready())
    ):
        if meter is None and now - begin >= seconds / 2:
            meter = board.meter()
        for _ in range(chunk):
            launch()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        flying.append(event)
        # Two chunks in flight keep the GPU busy while the host reads the one before.
        if len(flying) > 2:
            done = flying.popleft()
            done.synchronize()
            if is_counted:
                chunk_seconds.append(last.elapsed_time(done) / 1000 / chunk)
                into.clocks_mhz.append(board.clock_mhz())
            is_counted = meter is not None
            last = done
    assert meter is not None
    into.watts.append(meter.watts())
    into.steady_seconds.extend(chunk_seconds)
    torch.cuda.synchronize()


def rates(samples: Mapping[str, Samples], work: float) -> dict[str, float]:
    """Return the columns of a result row.

    The plain name is the steady rate, `<name>_burst` the other; beside them the SM clock in MHz,
    watts and work per joule of the steady state.

    Units:
        `work` per launch in units of the rate times a second: TFLOP for TFLOP/s.
    """
    columns: dict[str, float] = {}
    for name, taken in samples.items():
        steady = work / statistics.median(taken.steady_seconds)
        read = [watts for watts in taken.watts if not math.isnan(watts)]
        watts = statistics.median(read) if read else 0.0
        columns[name] = round(steady, 1)
        if taken.burst_seconds:
            columns[f"{name}_burst"] = round(work / statistics.median(taken.burst_seconds), 1)
        columns[f"{name}_mhz"] = round(statistics.median(taken.clocks_mhz))
        if read:
            columns[f"{name}_watts"] = round(watts)
            columns[f"{name}_per_joule"] = round(steady / watts, 3)
    return columns


def stamp(board: Board) -> dict[str, Any]:
    """Return what a result depends on besides its rows."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "power_limit_watts": round(board.power_limit_watts()),
        "driver": board.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": command(),
    }


def cpu_stamp() -> dict[str, Any]:
    """Return what a result without a GPU depends on besides its rows."""
    return {
        "gpu": None,
        "power_limit_watts": None,
        "driver": None,
        "torch": torch.__version__,
        "cuda": None,
        "cpu": cpu_name(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": command(),
    }


def command() -> str:
    """Return the command line of this run, without the places of its kernels and its result."""
    words = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    for option in {"--out", "--bundle"} & {*words}:
        place = words.index(option)
        del words[place : place + 2]
    return " ".join(words)


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the commit, with `+` if files differ from it; COMMIT names it where git is absent."""
    named = os.environ.get("COMMIT")
    if named:
        return named
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def result_path(bench: str, out: str | None) -> Path:
    """Return where the result of `bench` goes: `out`, else benchmarks/results/<gpu>/."""
    if out is not None:
        return Path(out)
    gpu = torch.cuda.get_device_name(0).lower().removeprefix("nvidia ").replace(" ", "-")
    return RESULTS / gpu / f"{bench}.json"


def write_result(
    path: Path, stamp: Mapping[str, Any], unit: str, rows: list[dict[str, Any]]
) -> None:
    """Write one result file, one row a line, whole or not at all."""
    head = json.dumps({"stamp": stamp, "unit": unit}, indent=1)[:-2]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(f'{head},\n "rows": [\n{body}\n ]\n}}\n')
    part.replace(path)


def table_line(row: Mapping[str, Any], names: list[str], label: str) -> str:
    """Return a row for the screen: steady / burst of each, and ratios of the first to the rest."""
    cells = [f"{n} {row[n]:.0f}/{row.get(n + '_burst', 0):.0f}" for n in names if n in row]
    first = names[0]
    if first in row:
        cells += [f"x{row[first] / row[n]:.2f} {n}" for n in names[1:] if n in row]
        cells.append(f"{row[first + '_mhz']} MHz {row.get(first + '_per_joule', 0):.2f}/J")
    return f"{label:32} " + "  ".join(cells)
