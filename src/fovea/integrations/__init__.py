"""One line each to put fovea behind another library's attention; nothing happens on import.

`fovea.integrations.torch_sdpa.activate()`, `fovea.integrations.transformers.register()`.
"""

import importlib
from typing import Any

_NAMES = ("torch_sdpa", "transformers")


def __getattr__(name: str) -> Any:
    """Import one integration when it is first asked for."""
    if name in _NAMES:
        return importlib.import_module(f"fovea.integrations.{name}")
    raise AttributeError(f"module 'fovea.integrations' has no attribute {name!r}")
