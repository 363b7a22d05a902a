"""Kernel variants as values that a cache, a bundle or a worker process can hold.

Lives here: the bridge from a plan to the code that builds its kernel. Not here: plans (`plan/`),
kernels (`kernels/`). Invariant: naming a variant and its key imports no compiler; `build` alone
does.
"""

from dataclasses import dataclass
from typing import Any

from fovea.plan import sm100
from fovea.plan.forward import ForwardPlan


@dataclass(frozen=True, slots=True)
class ForwardVariant:
    """A forward kernel of one plan."""

    plan: ForwardPlan

    @property
    def name(self) -> str:
        """Symbol of the launcher and prefix of the kernel's name."""
        return self.plan.name

    def key_text(self) -> str:
        """Return the canonical text of everything that shapes the code."""
        return self.plan.key_text()

    def build(self) -> tuple[Any, list[Any]]:
        """Return the host function and its fake arguments."""
        from fovea.kernels.portable.entry import build

        if isinstance(self.plan, sm100.ForwardPlan):
            from fovea.kernels.sm100.forward.kernel import ForwardKernel as BlackwellKernel

            return build(BlackwellKernel(self.plan))
        from fovea.kernels.sm90.forward.kernel import ForwardKernel as HopperKernel

        return build(HopperKernel(self.plan))
