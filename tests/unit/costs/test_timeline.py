"""Timelines: their window, their units, their letters, their Perfetto events."""

import json

import pytest

from fovea.costs.calibration import frozen
from fovea.costs.drawing import MEANINGS, letter_rows, mark_of, marks_of, plain_text
from fovea.costs.machine import B200
from fovea.costs.predict import kernel_of
from fovea.costs.timeline import perfetto, read_timeline, timeline_of, timeline_record
from fovea.plan.features import ForwardFeatures
from fovea.plan.sm100 import make_forward_plan


@pytest.fixture(scope="module")
def timeline():
    plan = make_forward_plan("bfloat16", (64, 64), ForwardFeatures(), arch="sm100")
    return timeline_of(kernel_of(plan, B200, frozen().calibration), 3)


def test_units_of_a_kv_tile_are_the_roofline_of_the_plan(timeline):
    cycles = {use.unit: use.cycles for use in timeline.units}
    assert cycles["tensor cores"] == pytest.approx(2 * 2 * 128 * 128 * 128 * 2 / 2 / 8192)
    assert cycles["shared memory"] == pytest.approx(2 * (256 + 128) + 256)
    assert all(
        use.share == pytest.approx(use.cycles / timeline.visit_cycles) for use in timeline.units
    )
    assert max(use.share for use in timeline.units) <= 1.05


def test_lanes_show_every_role_that_works(timeline):
    assert timeline.lanes[:2] == ("copies", "tensor cores")
    assert {"softmax 0", "softmax 1", "epilogue"} <= set(timeline.lanes)


def test_a_column_shows_what_took_most_of_it(timeline):
    width = 60
    step = (timeline.end - timeline.begin) / width
    rows = dict(letter_rows(timeline, width))
    marks = next(marks for lane, marks in rows.items() if lane.startswith("tensor cores"))
    assert len(marks) == width
    for span in timeline.spans:
        if span.lane == "tensor cores" and span.end - span.start > 2 * step:
            column = int((span.start + span.end) / 2 / step - timeline.begin / step)
            if 0 <= column < width:
                assert marks[column] == mark_of(span.name)


def test_text_has_title_rows_and_legend(timeline):
    lines = plain_text(timeline, 40).splitlines()
    assert "a query tile of 3 KV tiles" in lines[1]
    rows = [line for line in lines if line.startswith(("softmax ", "tensor cores "))]
    assert len(rows) == 3
    assert {line[0] for line in lines[-8:]} >= set("".join(row.split()[-1] for row in rows))
    assert lines[-1] == ".  idle, or waiting"


def test_every_piece_of_work_has_a_meaning(timeline):
    assert {mark.letter for mark in marks_of(timeline)} <= set(MEANINGS)
    names = [span.name for span in timeline.spans]
    assert {mark_of(name) for name in names} == set(marks_of(timeline))


def test_perfetto_events_have_a_lane_and_last_as_long_as_the_span(timeline):
    events = json.loads(perfetto(timeline))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(spans) == len(timeline.spans)
    assert {names[event["tid"]] for event in spans} == set(timeline.lanes)
    busy = sum(event["dur"] for event in spans if names[event["tid"]] == "tensor cores")
    expected = sum(s.end - s.start for s in timeline.spans if s.lane == "tensor cores")
    assert busy == pytest.approx(expected, rel=1e-3)


def test_a_timeline_survives_its_record(timeline):
    assert read_timeline(json.loads(json.dumps(timeline_record(timeline)))) == timeline
