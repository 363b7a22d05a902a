"""`python -m fovea` is the command `fovea`."""

import sys

from fovea.cli.main import main

sys.exit(main())
