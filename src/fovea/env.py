"""Every environment variable that fovea reads, as typed accessors.

Lives here: names, parsing and defaults. Each accessor reads the variable when it is called, so a
program may set one after importing fovea. What a value means to a component is said there.
Invariant: no other module reads the environment, and importing this one reads nothing.

| variable | value | default |
|---|---|---|
| FOVEA_BUNDLE | folder of ahead-of-time artifacts to use | none |
| FOVEA_CACHE_DIR | folder of the compile cache | the user's cache folder |
| FOVEA_CACHE_LIMIT | size cap of the cache: bytes, or a number with K, M, G, T (binary) | 2G |
| FOVEA_CHECK | 1: check on a GPU what costs a sync (varlen, gathers out of range, x // 0) | 0 |
| FOVEA_QUIET | 1: no progress lines | 0 |
| FOVEA_RUNTIME_LIBRARY | libcute_dsl_runtime.so where the wheel is absent | the wheel's |
"""

import os
from pathlib import Path

from fovea.errors import invalid

DEFAULT_CACHE_LIMIT_BYTES = 2 * 1024**3

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def bundle() -> Path | None:
    """Return the folder of ahead-of-time artifacts named by FOVEA_BUNDLE, if any."""
    return _path("FOVEA_BUNDLE")


def cache_dir() -> Path:
    """Return the folder of the compile cache; it need not exist."""
    named = _path("FOVEA_CACHE_DIR")
    if named is not None:
        return named
    try:
        import platformdirs
    except ImportError:
        # The default of the XDG base directory specification, for a machine without platformdirs.
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(root) / "fovea"
    return Path(platformdirs.user_cache_dir("fovea", appauthor=False))


def cache_limit_bytes() -> int:
    """Return the size cap of the compile cache in bytes.

    Raises:
        ValueError: FOVEA_CACHE_LIMIT is not a size.
    """
    text = os.environ.get("FOVEA_CACHE_LIMIT", "").strip().upper().removesuffix("B")
    if not text:
        return DEFAULT_CACHE_LIMIT_BYTES
    unit = text[-1] if text[-1] in _UNITS else ""
    number = text.removesuffix(unit) if unit else text
    try:
        value = float(number) * _UNITS[unit]
        if not 0 <= value < 2**63:
            raise ValueError
    except ValueError:
        raise ValueError(
            invalid(
                "FOVEA_CACHE_LIMIT",
                repr(os.environ["FOVEA_CACHE_LIMIT"]),
                "bytes, or a number with K, M, G or T",
                "set it to 2G, say, or unset it",
            )
        ) from None
    return int(value)


def check() -> bool:
    """Return whether checks that cost a device sync are wanted (FOVEA_CHECK)."""
    return _flag("FOVEA_CHECK")


def quiet() -> bool:
    """Return whether progress lines are unwanted (FOVEA_QUIET)."""
    return _flag("FOVEA_QUIET")


def runtime_library() -> Path | None:
    """Return the runtime library named by FOVEA_RUNTIME_LIBRARY, if any."""
    return _path("FOVEA_RUNTIME_LIBRARY")


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Return the CUTE_DSL_* variables in force, sorted: they change what the compiler emits."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_")))


def hide_gpus() -> None:
    """Make CUDA see no device in this process and its children; call before CUDA is started."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _path(name: str) -> Path | None:
    text = os.environ.get(name, "")
    return Path(text).expanduser() if text else None


def _flag(name: str) -> bool:
    text = os.environ.get(name, "")
    value = text.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    allowed = "1, true, yes or on; 0, false, no or off"
    raise ValueError(invalid(name, repr(text), allowed, "set one of them or unset it"))
