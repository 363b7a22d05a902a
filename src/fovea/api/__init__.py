"""The public functions. Each turns its arguments into a problem and hands it to `ops/`."""

from fovea.api.attention import Aux, AuxRequest, attention, attention_varlen
from fovea.api.flex import flex_attention

__all__ = ["Aux", "AuxRequest", "attention", "attention_varlen", "flex_attention"]
