"""The public functions. Each turns its arguments into a problem and hands it to `ops/`."""

from fovea.api.attention import Aux, AuxRequest, attention, attention_varlen
from fovea.api.explain import Explanation, explain
from fovea.api.flex import flex_attention
from fovea.api.precompile import precompile

__all__ = [
    "Aux",
    "AuxRequest",
    "Explanation",
    "attention",
    "attention_varlen",
    "explain",
    "flex_attention",
    "precompile",
]
