"""Scripts import their neighbours by name, last, so that no package gives way to one of them; the model of
`traces_for_tests`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from traces_for_tests import relu  # noqa: F401
