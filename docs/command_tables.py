"""The parts of the command line's page that the commands themselves know.

Lives here: the table of a call's words, with their defaults, and that of the options. Not here:
where it goes (`tables.py`). Invariant: read from the parser, so that no word is left out.
"""

from typing import Any

from fovea.arch import ARCHS
from fovea.cli.application import application
from fovea.cli.call import DEFAULT, DEFAULT_DTYPE, DTYPES, EMULATED, SIZES
from fovea.costs.coverage import coverage

_CALLS = ("explain", "compile", "bench", "emulate")  # subcommands that take a CALL


def call_words() -> str:
    """Return the table of the words of CALL."""
    lines = ["| word | means | left out | of `fovea emulate` |", "|---|---|---|---|"]
    for word, size in SIZES.items():
        defaults = [
            f"as {size.follows}" if size.follows else f"{word}{getattr(shape, size.field)}"
            for shape in (DEFAULT, EMULATED)
        ]
        lines.append(f"| `{word}` and a number | {size.meaning} | {' | '.join(defaults)} |")
    names = " ".join(f"`{name}`" for name in DTYPES)
    lines.append(f"| {names} | dtype of q, k and v | {DEFAULT_DTYPE} | {DEFAULT_DTYPE} |")
    return "\n".join(lines)


def options() -> str:
    """Return the table of the options of the subcommands that take a CALL."""
    import typer

    group: Any = typer.main.get_command(application)
    commands = {name: group.commands[name] for name in _CALLS}
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, command in commands.items():
        for option in command.params:
            if option.param_type_name != "option" or "--help" in option.opts:
                continue
            found.setdefault((_form(option), _default(option), option.help), []).append(name)
    lines = ["| option | of | default | means |", "|---|---|---|---|"]
    for (form, default, meaning), names in found.items():
        of = "all four" if len(names) == len(_CALLS) else ", ".join(names)
        meaning = meaning.replace("|", "\\|")
        lines.append(f"| {form} | {of} | {default} | {meaning} |")
    return "\n".join(lines)


def _form(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    return " ".join(f"`{word}{value}`" for word in (*option.opts[:1], *option.secondary_opts[:1]))


def _default(option: Any) -> str:
    return "" if option.default in (None, False) else f"{option.default}"


def timeline_calls() -> str:
    """Return the sentence about the calls that a timeline is drawn of."""
    return f"It covers {coverage(*ARCHS)}. Another call raises `UnsupportedError` and says so."
