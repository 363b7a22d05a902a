"""A CTA's timeline: what each role and unit did when, and how much of each unit a KV tile takes.

Lives here: the values, and their Perfetto JSON. Not here: drawings (`cli/timeline.py`), what is
simulated (`sm90.py`, `sm100.py`). Invariant: times are clocks of an SM, of a model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fovea.costs.engine import Span
from fovea.costs.predict import Kernel
from fovea.costs.work import UNITS

QUERY_TILES = 3  # simulated: the first begins cold, the last ends alone


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUse:
    """Clocks of a unit for a KV tile of a CTA, and their share of the time that the tile takes."""

    unit: str
    cycles: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A CTA that does query tiles in a row.

    Attributes:
        lanes: roles and units, in the order of the drawing.
        begin, end: of the middle query tile, about: of the part to look at.
        units: of one more KV tile.
        visit_cycles: time that one more KV tile takes.
    """

    kernel: str
    visits: int
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    begin: float
    end: float
    units: tuple[UnitUse, ...]
    visit_cycles: float


def timeline_of(kernel: Kernel, visits: int) -> Timeline:
    """Return the timeline of query tiles of so many KV tiles."""
    done = kernel.simulate([visits] * QUERY_TILES)
    one, longer = (kernel.simulate([n] * QUERY_TILES) for n in (visits + 4, visits + 8))
    tiles = 4 * QUERY_TILES
    visit = (longer.now - one.now) / tiles
    uses = [(text, (longer.busy[unit] - one.busy[unit]) / tiles) for unit, text in UNITS.items()]
    third = done.now / QUERY_TILES
    return Timeline(
        kernel=kernel.name,
        visits=visits,
        lanes=_lanes(done.spans),
        spans=tuple(sorted(done.spans, key=lambda span: (span.lane, span.start))),
        begin=third,
        end=min(done.now, 2 * third),
        units=tuple(UnitUse(unit=text, cycles=c, share=c / visit) for text, c in uses if c > 0),
        visit_cycles=visit,
    )


def _lanes(spans: Sequence[Span]) -> tuple[str, ...]:
    """Return the lanes: what feeds the tensor cores, they, and who takes from them."""
    found = sorted({span.lane for span in spans})
    first = [lane for lane in ("copies", "tensor cores") if lane in found]
    return (*first, *(lane for lane in found if lane not in first))


def timeline_record(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as JSON values."""
    return asdict(timeline)


def read_timeline(record: Mapping[str, Any]) -> Timeline:
    """Return the timeline that `timeline_record` made values of."""
    return Timeline(
        kernel=record["kernel"],
        visits=record["visits"],
        lanes=tuple(record["lanes"]),
        spans=tuple(Span(**span) for span in record["spans"]),
        begin=record["begin"],
        end=record["end"],
        units=tuple(UnitUse(**use) for use in record["units"]),
        visit_cycles=record["visit_cycles"],
    )


def perfetto(timeline: Timeline) -> str:
    """Return the timeline as Chrome/Perfetto trace JSON; a microsecond there is a clock here."""
    numbers = {lane: number for number, lane in enumerate(timeline.lanes)}
    process = f"a model of {timeline.kernel}: 1 us = 1 clock of an SM"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}}
    ]
    for lane, number in numbers.items():
        name = {"name": lane}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": name})
        order = {"sort_index": number}
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": number, "args": order}
        )
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "ts": round(span.start, 2),
                "dur": round(span.end - span.start, 2),
                "pid": 0,
                "tid": numbers[span.lane],
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write the timeline for Perfetto or chrome://tracing."""
    path.write_text(perfetto(timeline), encoding="utf-8")
