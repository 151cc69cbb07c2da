"""The benchmark's tests run the models that the runtime's tests pack."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
