"""A kernel that evaluates many mod graphs, one thread a position, for the test of operations."""

from dataclasses import dataclass
from typing import Any

from fovea.mods.graph import Graph

THREADS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModVariant:
    """out[g, i] = graphs[g](score[i], b[i], h[i], q_idx[i], kv_idx[i]), all reading `captures`.

    With `in_pairs` keys come in pairs whose first is even, and what depends on the key alone is
    loaded for two at once.
    """

    graphs: tuple[Graph, ...]
    wide_integers: bool
    in_pairs: bool = False
    name: str = "mod_operations"

    def key_text(self) -> str:
        """Return the canonical text."""
        texts = "\n".join(graph.text() for graph in self.graphs)
        return f"mod operations wide={self.wide_integers} pairs={self.in_pairs}\n{texts}"

    def build(self) -> tuple[Any, list[Any]]:
        """Return the host function and its fake arguments."""
        import mod_kernel

        return mod_kernel.host(self), mod_kernel.arguments(self)
