"""Entry point of the command `fovea`.

Lives here: what works without the extra `cli`, which is `fovea info` and `fovea --version`, and the
message that names the extra. The commands themselves are assembled in `application.py`. Invariant:
importing this module imports no optional package.
"""

import sys
from collections.abc import Sequence

from fovea.cli import info
from fovea.version import __version__

MISSING = """\
fovea {command} needs the package {package!r}, which is not installed.
Install fovea with the extra cli: pip install 'fovea-attention[cli]' (in a clone: '.[cli]').
Without it, `fovea info` works.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from fovea.cli.application import run_application
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        if words[:1] == ["info"]:
            return info.run_plain(words[1:])
        if words == ["--version"]:
            print(__version__)
            return 0
        command = words[0] if words and not words[0].startswith("-") else "--help"
        sys.stderr.write(MISSING.format(command=command, package=package))
        return 2
    return run_application(words)
