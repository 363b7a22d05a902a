"""The subcommands, assembled into one typer application.

Lives here: names, order and how an error reaches the terminal. What a subcommand does is in the
file of its name. Invariant: imported only where typer is installed.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fovea.cli import bench, cache, demo, emulate, explain, info
from fovea.cli import compile as compile_command
from fovea.errors import FoveaError, invalid
from fovea.version import __version__

application = typer.Typer(
    name="fovea",
    help="Exact attention for PyTorch with plain-Python score and mask mods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# What wrong input, a missing package, the compiler or a full disk end in; the rest is a bug of
# ours and shows where.
EXPECTED = (FoveaError, ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError)


class _Settings:
    """What the options before the subcommand set."""

    traceback = False


def run_application(words: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    if {"--causal", "--causal-top-left"} <= set(words):
        # One option with two names to typer, of which the last one would win.
        problem = invalid(
            "--causal", "given with --causal-top-left", "one of the two", "leave one out"
        )
        sys.stderr.write(f"error: {problem}\n")
        return 1
    try:
        application(args=list(words), prog_name="fovea")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(__version__)
        raise typer.Exit


@application.callback()
def _options(  # pyright: ignore[reportUnusedFunction] - typer calls it
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from.")
    ] = False,
    version: Annotated[  # pyright: ignore[reportUnusedParameter] - its callback ends the program
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    _Settings.traceback = traceback


def _info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed, which backends work here, and why another does not."""
    info.show(as_json=as_json)  # info.py itself runs without typer


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Let an error of fovea end the program with its text: it says what to do."""

    @functools.wraps(command)
    def run(*arguments: Any, **keywords: Any) -> None:
        try:
            command(*arguments, **keywords)
        except BrokenPipeError:
            raise  # `fovea cache list | head -1` is no error: click ends without a word
        except EXPECTED as error:
            if _Settings.traceback:
                raise
            sys.stderr.write(f"error: {error}\n(fovea --traceback ... shows where it came from)\n")
            raise typer.Exit(1) from error

    return run


for _name, _command in {
    "demo": demo.run,
    "info": _info,
    "explain": explain.run,
    "compile": compile_command.run,
    "bench": bench.run,
    "emulate": emulate.run,
}.items():
    application.command(_name)(_guarded(_command))

_cache = typer.Typer(no_args_is_help=True, help="Show or clear the cache of compiled kernels.")
_cache.command("list")(_guarded(cache.show))
_cache.command("clear")(_guarded(cache.clear))
application.add_typer(_cache, name="cache")
