"""Makes driver_api and the emulator tests' kernel builders importable here."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "emulator" / "isa")]
