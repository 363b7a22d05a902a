"""An optional record of a launch over scheduler steps, for Perfetto.

Lives here: events and their JSON. Not here: sums (`counters.py`). Invariant: times are scheduler
steps, not nanoseconds: they show order and waiting, not speed.
"""

import json
from pathlib import Path
from typing import Any


class Trace:
    """Events of one launch: waits of warps and spans of asynchronous operations."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._named: set[tuple[int, int]] = set()

    def wait(self, warp: Any, wait: Any, step: int) -> None:
        """Note a wait that ends now."""
        if step > wait.since:
            self._span(warp, f"wait {wait.name}", wait.since, step, {"for": wait.describe()})

    def run(self, warp: Any, step: int, segment: Any) -> None:
        """Note that a warp ran during one step, from the start of a segment on."""
        args: dict[str, Any] = {"segment": segment.number}
        if segment.instructions:
            first = segment.instructions[0]
            args |= {"PTX line": first.line, "instruction": first.text}
        self._span(warp, "run", step, step + 1, args)

    def instant(self, warp: Any, name: str, step: int) -> None:
        """Note a moment, such as the completion of a copy."""
        self._name(warp)
        process, thread = _ids(warp)
        self._events.append(
            {"ph": "i", "s": "t", "name": name, "ts": step, "pid": process, "tid": thread}
        )

    def write(self, path: Path) -> None:
        """Write the events as Chrome/Perfetto trace JSON."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"}))

    def _span(self, warp: Any, name: str, start: int, end: int, args: dict[str, Any]) -> None:
        self._name(warp)
        process, thread = _ids(warp)
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "ts": start,
                "dur": end - start,
                "pid": process,
                "tid": thread,
                "args": args,
            }
        )

    def _name(self, warp: Any) -> None:
        ids = _ids(warp)
        if ids in self._named:
            return
        self._named.add(ids)
        process, thread = ids
        for kind, text in (
            ("process_name", f"CTA {warp.cta.index}"),
            ("thread_name", f"warp {warp.index}"),
        ):
            self._events.append(
                {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}
            )


def _ids(warp: Any) -> tuple[int, int]:
    cluster = warp.cta.cluster
    return cluster.number * len(cluster.ctas) + warp.cta.rank, warp.index
