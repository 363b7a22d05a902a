"""What needs a CUDA device, and artifacts: a compiler here, or FOVEA_BUNDLE."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
