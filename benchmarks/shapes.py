"""The shapes that benchmarks time, and how a command line picks among them.

Lives here: the 27 forward and backward shapes, four of wide heads, their FLOPs, the parser of
`B1 H16 S8192 D128 causal`. Not here: how a time is taken (`protocol.py`).
"""

from dataclasses import asdict, dataclass

_LENGTHS = ((32, 512), (8, 2048), (2, 8192), (1, 16384))
_HEADS_BY_DIM = ((64, 32), (128, 16), (256, 8))


@dataclass(frozen=True, slots=True)
class Shape:
    """One dense attention call; the names are those of a result row."""

    B: int
    H: int
    Hkv: int
    S: int
    D: int
    causal: bool
    Dv: int | None = None  # head dim of V where it is not D

    @property
    def head_dim_v(self) -> int:
        """Head dim of V."""
        return self.D if self.Dv is None else self.Dv

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, by the field's convention: half of all when causal."""
        return self.S * self.S // 2 if self.causal else self.S * self.S

    def forward_flops(self, pairs: int | None = None) -> int:
        """Return FLOPs of a forward, of `pairs` visible pairs if given; a backward has 2.5x."""
        columns = self.D + self.head_dim_v
        return 2 * self.B * self.H * columns * (self.pairs if pairs is None else pairs)

    def row(self) -> dict[str, int | bool]:
        """Return the shape as the head of a result row."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        kv = "" if self.Hkv == self.H else f" Hkv{self.Hkv}"
        dims = f"D{self.D}" + ("" if self.Dv is None else f" Dv{self.Dv}")
        return f"B{self.B} H{self.H}{kv} S{self.S} {dims} {'causal' if self.causal else 'full'}"


DENSE_SHAPES = (
    *(
        Shape(batch, heads, heads, seqlen, head_dim, causal)
        for head_dim, heads in _HEADS_BY_DIM
        for causal in (False, True)
        for batch, seqlen in _LENGTHS
    ),
    Shape(1, 32, 8, 8192, 128, True),
    Shape(4, 32, 8, 4096, 128, True),
    Shape(1, 64, 8, 32768, 128, True),
)

# Head dims beyond 256: of V alone, and of Q and K too. Few peers take them; flex has to be asked.
WIDE_SHAPES = tuple(
    Shape(1, 8, 8, 8192, head_dim, causal, Dv=512)
    for head_dim in (64, 512)
    for causal in (False, True)
)

# The two that the Hopper forward is judged by, and one of each other head dim.
QUICK_SHAPES = (
    Shape(1, 16, 16, 16384, 128, False),
    Shape(1, 16, 16, 16384, 128, True),
    Shape(1, 32, 32, 16384, 64, False),
    Shape(1, 8, 8, 16384, 256, True),
)

MOD_SHAPE = Shape(2, 16, 16, 8192, 128, False)


def select(words: list[str], shapes: tuple[Shape, ...] = DENSE_SHAPES) -> tuple[Shape, ...]:
    """Return the shapes that match every word: `D128`, `Dv512`, `S8192`, `causal`, `full`.

    Raises:
        ValueError: a word is none of these, or nothing matches.
    """
    chosen = shapes
    for word in words:
        key = word.rstrip("0123456789")
        if word in ("causal", "full"):
            chosen = tuple(s for s in chosen if s.causal == (word == "causal"))
        elif key in ("B", "H", "Hkv", "S", "D", "Dv") and word != key:
            value = int(word[len(key) :])
            chosen = tuple(s for s in chosen if getattr(s, key) == value)
        else:
            raise ValueError(
                f"shape word {word!r} is not valid (allowed: B, H, Hkv, S, D or Dv with a "
                "number, causal, full); write for example: S16384 D128 causal."
            )
    if not chosen:
        known = "; ".join(str(s) for s in shapes)
        raise ValueError(f"no shape matches {' '.join(words)!r} (known: {known}); drop a word.")
    return chosen
