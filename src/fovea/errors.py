"""The exceptions and the warning of fovea, and the one way their texts are built.

Lives here: error types and the text builders. Checks of user arguments live in `problem.py`, limits
of a backend beside the backend. Invariant: every message names the argument, the value got, the
values allowed and the way out.
"""


class FoveaError(Exception):
    """Base of the errors that only fovea raises."""


class UnsupportedError(FoveaError, NotImplementedError):
    """Right input that the chosen backend lacks; another backend takes it."""


class TraceError(FoveaError, TypeError):
    """A score_mod or mask_mod that cannot be turned into a graph."""


class GatherError(FoveaError, IndexError, ValueError):
    """A mod indexes a captured tensor beyond its end; torch's own indexing gives an IndexError."""


class FoveaWarning(UserWarning):
    """Something ran, but not in the way the caller may expect."""


def invalid(argument: str, got: object, allowed: str, remedy: str) -> str:
    """Return the text of an error about one argument.

    Args:
        argument: name of the argument as the user wrote it.
        got: the value, or a description of it; tensors must be described, not passed.
        allowed: the values that would have been right.
        remedy: what to do now, as an imperative clause.
    """
    return f"{argument}={got} is not valid (allowed: {allowed}); {remedy}."


def missing_package(what: str, package: str, extra: str) -> str:
    """Return the text of an error about a package that is not installed.

    Args:
        what: what needs it, as the start of the sentence.
        package: name of its distribution.
        extra: the extra of fovea that brings it.
    """
    return (
        f"{what} needs the package {package!r}, which is not installed; pip install "
        f"'fovea-attention[{extra}]' (in a clone: pip install -e '.[{extra}]')."
    )
