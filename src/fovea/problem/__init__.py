"""One validated attention call: the value, and the only place where user arguments are checked.

Invariant: a problem that exists is valid, apart from tensor *contents*, which `check_contents`
looks at: always on a CPU, elsewhere under FOVEA_CHECK=1 alone.
"""

from fovea.problem.build import Request, VarlenRequest, make_dense, make_varlen
from fovea.problem.contents import check_contents
from fovea.problem.gathers import check_gathers
from fovea.problem.value import (
    AttentionProblem,
    Causal,
    ForwardResult,
    GradientNeeds,
    Gradients,
    Results,
    Varlen,
    Window,
    strides_in_order,
)

__all__ = [
    "AttentionProblem",
    "Causal",
    "ForwardResult",
    "GradientNeeds",
    "Gradients",
    "Request",
    "Results",
    "Varlen",
    "VarlenRequest",
    "Window",
    "check_contents",
    "check_gathers",
    "make_dense",
    "make_varlen",
    "strides_in_order",
]
