"""fovea: exact attention for PyTorch, customised by plain-Python score and mask functions."""

import importlib
from typing import Any

from fovea import flash_attn, mods
from fovea.api import (
    Aux,
    AuxRequest,
    Explanation,
    attention,
    attention_varlen,
    explain,
    flex_attention,
    precompile,
)
from fovea.errors import FoveaError, FoveaWarning, GatherError, TraceError, UnsupportedError
from fovea.tiling.block_mask import create_block_mask
from fovea.version import __version__

__all__ = [
    "Aux",
    "AuxRequest",
    "Explanation",
    "FoveaError",
    "FoveaWarning",
    "GatherError",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_varlen",
    "create_block_mask",
    "explain",
    "flash_attn",
    "flex_attention",
    "mods",
    "precompile",
]


def __getattr__(name: str) -> Any:
    """Import `fovea.integrations` when it is first asked for: it needs what others may lack."""
    if name == "integrations":
        return importlib.import_module("fovea.integrations")
    raise AttributeError(f"module 'fovea' has no attribute {name!r}")
