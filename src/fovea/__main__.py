"""`python -m fovea` is the command `fovea`."""

import sys

from fovea.cli.main import main

if __name__ == "__main__":  # worker processes of the compile pool import this file too
    sys.exit(main())
