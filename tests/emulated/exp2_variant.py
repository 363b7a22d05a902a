"""A kernel that takes powers of two on the FMA pipe, two a thread, for their test."""

from dataclasses import dataclass
from typing import Any

THREADS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Exp2Variant:
    """out[i] = 2^x[i]; the length is even."""

    name: str = "exp2_pairs"

    def key_text(self) -> str:
        """Return the canonical text."""
        return "exp2 pairs"

    def build(self) -> tuple[Any, list[Any]]:
        """Return the host function and its fake arguments."""
        import exp2_kernel

        return exp2_kernel.host(self), exp2_kernel.arguments()
