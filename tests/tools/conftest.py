"""The tools are scripts; their functions are imported from where they lie."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # last, so that no package gives way to one of them
