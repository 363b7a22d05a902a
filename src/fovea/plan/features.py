"""What an attention variant does, as compile-time facts; lengths and scalars are never among them.

Lives here: the `ForwardFeatures` value that a plan carries into code generation, and its canonical
text. Not here: which features an architecture has (`plan/select.py`), tile shapes
(`plan/sm90_tiles.py`). Invariant: two calls with equal features (and dtype and head dimensions) run
the same kernel.
"""

from dataclasses import dataclass
from hashlib import sha256

from fovea.mods.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFeatures:
    """Compile-time features of a forward kernel.

    The diagonal's offset and the window's widths are run-time arguments, so both causal alignments
    and every window share the two flags `limit_left` and `limit_right`.
    """

    limit_left: bool = False
    limit_right: bool = False
    softcap: bool = False
    explicit_scale: bool = False  # the scale may be <= 0, so it cannot be folded behind the maximum
    sink: bool = False
    max_score: bool = False
    score_mod: Graph | None = None
    mask_mod: Graph | None = None
    block_lists: bool = False
    full_lists: bool = False
    block_mask_mod: Graph | None = None
    block_bits: bool = False  # of partial blocks, in place of the block mask's mask_mod
    key_ranges: bool = False  # each row's keys as a range in memory, in place of block lists
    wide_integers: bool = False  # a mod's run-time integer needs 64-bit index arithmetic
    varlen: bool = False  # packed sequences, whose lengths lie in device memory

    def __post_init__(self) -> None:
        """Check that the features fit together."""
        assert self.block_lists or not (self.full_lists or self.block_mask_mod)
        assert self.block_lists or not self.block_bits
        assert not (self.block_bits and self.block_mask_mod)
        assert not (self.key_ranges and (self.block_lists or self.varlen))

    @property
    def modifies_score(self) -> bool:
        """True where the kernel needs the scaled score itself, not only its exponential."""
        return self.softcap or self.explicit_scale or self.score_mod is not None

    @property
    def has_mods(self) -> bool:
        """True where a user's function runs in the kernel."""
        return bool(self.score_mod or self.mask_mod or self.block_mask_mod)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The mod graphs in the order their captures and scalars reach the kernel."""
        candidates = (self.score_mod, self.mask_mod, self.block_mask_mod)
        return tuple(graph for graph in candidates if graph is not None)

    @property
    def tag(self) -> str:
        """The end of a kernel's name, by which a person tells variants apart; "" of the plain one.

        Six digits of a hash, as a graph has no shorter name. Nothing but names depends on it.
        """
        if self == ForwardFeatures():
            return ""
        return f"_{sha256(self.key_text().encode()).hexdigest()[:6]}"

    def key_text(self) -> str:
        """Return the canonical text of these features, part of the artifact's key."""
        flags = [name for name in _FLAGS if getattr(self, name)]
        graphs = [
            f"{name}={graph.text()}"
            for name in ("score_mod", "mask_mod", "block_mask_mod")
            if (graph := getattr(self, name)) is not None
        ]
        return " ".join(["features:", *flags, *graphs])


_FLAGS = (
    "limit_left",
    "limit_right",
    "softcap",
    "explicit_scale",
    "sink",
    "max_score",
    "block_lists",
    "full_lists",
    "block_bits",
    "key_ranges",
    "wide_integers",
    "varlen",
)
