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
# In the order of the legend, which names those that a drawing has.
MEANINGS = {
    "q": "a tile of Q comes into shared memory",
    "k": "a tile of K, or a part of one",
    "v": "a tile of V, or a part of one",
    "S": "scores of a KV tile: Q times K",
    "O": "output of a KV tile: P times V, added up",
    "r": "scores are read from tensor memory",
    "m": "maxima of the rows of a KV tile",
    "e": "softmax of a KV tile, for the most part exponentials",
    "l": "what machine code leaves of it until the output has been waited for",
    "1": "softmax of a query tile's first KV tile, with its maxima",
    "c": "the output is rescaled to new maxima",
    "w": "a query tile's output is read, divided by its sums and written",
    ".": "idle, or waiting",
}
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
    """Return the lines above the rows."""
    step = (timeline.end - timeline.begin) / width
    tiles = "KV tile" if timeline.visits == 1 else "KV tiles"
    return (
        f"{timeline.kernel}\none SM's work on a query tile of {timeline.visits} {tiles}, between "
        f"the ends of those before and after it\n"
        f"time runs to the right, {step:.0f} clocks a column; a letter is what took most of them"
    )


def legend(timeline: Timeline, width: int) -> str:
    """Return what the letters of a drawing mean, one a line."""
    shown = {mark.letter for _, marks in letter_rows(timeline, width) for mark in marks}
    return "\n".join(f"{letter}  {text}" for letter, text in MEANINGS.items() if letter in shown)


def marks_of(timeline: Timeline) -> tuple[Mark, ...]:
    """Return how the pieces of work of a timeline are shown, in the order of the legend."""
    marks = {mark_of(span.name) for span in timeline.spans}
    return tuple(sorted(marks, key=lambda mark: list(MEANINGS).index(mark.letter)))


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
    return "\n".join([title(timeline, width), "", *rows, "", legend(timeline, width)])
