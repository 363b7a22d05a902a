"""A timeline as rows of letters, the same for a terminal and for a page.

Lives here: which letter and colour a piece of work has, and the rows. Not here: the terminal and
the picture (`cli/timeline.py`). Invariant: a column shows what took most of its clocks, and nothing
where less than half of them were used.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fovea.costs.timeline import Timeline


class Mark(NamedTuple):
    """How a piece of work is shown."""

    letter: str
    colour: str


IDLE = Mark(".", "dim")
LEGEND = (
    "S, O products; e exponentials, l those behind the wait for O; 1 first tile, m maximum, "
    "r S read,\nc correction, w way out; k v q copies; . idle"
)
_MARKS = {
    "exponentials": Mark("e", "#ccbb44"),
    "softmax": Mark("e", "#ccbb44"),
    "softmax, late part": Mark("l", "#aa9922"),
    "first tile": Mark("1", "#997700"),
    "first softmax": Mark("1", "#997700"),
    "maximum": Mark("m", "#aa3377"),
    "load S": Mark("r", "#66ccee"),
    "epilogue": Mark("w", "#228833"),
    "store O": Mark("w", "#228833"),
    "correction": Mark("c", "#aa3377"),
}
# Products and copies have the number of their stream behind them.
_FAMILIES = {
    "S": Mark("S", "#4477aa"),
    "O": Mark("O", "#ee6677"),
    "k": Mark("k", "#66ccee"),
    "v": Mark("v", "#bbbbbb"),
    "q": Mark("q", "#88aa88"),
}


def mark_of(name: str) -> Mark:
    """Return how a piece of work is shown."""
    found = _MARKS.get(name)
    return _FAMILIES[name[0] if name[0] in "SO" else name[0].lower()] if found is None else found


def title(timeline: Timeline, width: int) -> str:
    """Return the line above the rows."""
    step = (timeline.end - timeline.begin) / width
    return (
        f"{timeline.kernel}: a query tile of {timeline.visits} KV tiles among its like; "
        f"a column is {step:.0f} clocks"
    )


def letter_rows(timeline: Timeline, width: int) -> Iterator[tuple[str, list[Mark]]]:
    """Yield each lane's name, padded, and its columns."""
    step = (timeline.end - timeline.begin) / width
    longest = max(map(len, timeline.lanes)) + 2
    for lane in timeline.lanes:
        spans = [span for span in timeline.spans if span.lane == lane]
        marks: list[Mark] = []
        for column in range(width):
            begin = timeline.begin + column * step
            taken: defaultdict[str, float] = defaultdict(float)
            for span in spans:
                shared = min(span.end, begin + step) - max(span.start, begin)
                if shared > 0:
                    taken[span.name] += shared
            is_busy = sum(taken.values()) > step / 2
            marks.append(mark_of(max(taken, key=lambda name: taken[name])) if is_busy else IDLE)
        yield f"{lane:<{longest}}", marks


def plain_text(timeline: Timeline, width: int) -> str:
    """Return title, rows and legend without colours."""
    rows = (
        f"{lane}{''.join(mark.letter for mark in marks)}"
        for lane, marks in letter_rows(timeline, width)
    )
    return "\n".join([title(timeline, width), "", *rows, "", LEGEND])
