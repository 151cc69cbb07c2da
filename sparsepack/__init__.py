"""sparsepack: find where a language model is sparse, pack it so that hardware profits, prove it is the same model.

The functions and types below are what programs use; docs/library.md shows them. Each is imported when it is first
asked for, so that `import sparsepack` costs nothing.
"""

import sys

# `python -m sparsepack` puts the working folder first in the search path, which may be that of a downloaded model: its
# Python files must not be taken for modules of Python's own, or of others.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and any(arg.split(".")[0] == __name__ for arg in sys.orig_argv):
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsepack.integration.transformers.registration import register as _register_with_transformers
from sparsepack.version import __version__ as __version__

__all__ = [
    "AllocationOptions",
    "AttentionOptions",
    "CalibrateOptions",
    "DistilOptions",
    "EvalRequest",
    "GenerateOptions",
    "Generated",
    "Generation",
    "Model",
    "PackRequest",
    "PlaceOptions",
    "PruneOptions",
    "Quickstart",
    "QuickstartOptions",
    "RecipeOutcome",
    "RefitOptions",
    "RotateOptions",
    "SimulateOptions",
    "TraceOptions",
    "UserError",
    "calibrate",
    "card",
    "distil",
    "evaluate",
    "load",
    "pack",
    "place",
    "prune",
    "push",
    "quickstart",
    "records",
    "report",
    "rotate",
    "run",
    "simulate",
    "thresholds",
    "trace",
    "verify",
]

if TYPE_CHECKING:
    from sparsepack.calibrate.collect import CalibrateOptions
    from sparsepack.calibrate.collection import calibrate
    from sparsepack.calibrate.distil import DistilOptions
    from sparsepack.calibrate.distillation import distil
    from sparsepack.calibrate.find_thresholds import make_thresholds as thresholds
    from sparsepack.calibrate.prune import PruneOptions
    from sparsepack.calibrate.pruning import prune
    from sparsepack.calibrate.refit import RefitOptions
    from sparsepack.calibrate.rotate import RotateOptions
    from sparsepack.calibrate.rotation import rotate
    from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
    from sparsepack.calibrate.trace import TraceOptions
    from sparsepack.calibrate.tracing import trace
    from sparsepack.errors import UserError
    from sparsepack.eval.options import EvalRequest
    from sparsepack.eval.run import evaluate
    from sparsepack.files.records import records
    from sparsepack.formats.verify import verify
    from sparsepack.loading import Model, load
    from sparsepack.packing import PackRequest, pack
    from sparsepack.placement.options import PlaceOptions
    from sparsepack.placing import place
    from sparsepack.publish.card import model_card as card
    from sparsepack.publish.hub import push
    from sparsepack.publish.page import report_page as report
    from sparsepack.quickstarting import Quickstart, QuickstartOptions, quickstart
    from sparsepack.recipe.run import RecipeOutcome
    from sparsepack.recipe.run import run_recipe as run
    from sparsepack.runtime.generation.generate import Generated, Generation
    from sparsepack.runtime.options import GenerateOptions
    from sparsepack.simulation.options import SimulateOptions
    from sparsepack.simulation.run import simulate

_HOMES = {
    "AllocationOptions": "sparsepack.calibrate.thresholds",
    "AttentionOptions": "sparsepack.calibrate.thresholds",
    "CalibrateOptions": "sparsepack.calibrate.collect",
    "DistilOptions": "sparsepack.calibrate.distil",
    "EvalRequest": "sparsepack.eval.options",
    "GenerateOptions": "sparsepack.runtime.options",
    "Generated": "sparsepack.runtime.generation.generate",
    "Generation": "sparsepack.runtime.generation.generate",
    "Model": "sparsepack.loading",
    "PackRequest": "sparsepack.packing",
    "PlaceOptions": "sparsepack.placement.options",
    "PruneOptions": "sparsepack.calibrate.prune",
    "Quickstart": "sparsepack.quickstarting",
    "QuickstartOptions": "sparsepack.quickstarting",
    "RecipeOutcome": "sparsepack.recipe.run",
    "RefitOptions": "sparsepack.calibrate.refit",
    "RotateOptions": "sparsepack.calibrate.rotate",
    "SimulateOptions": "sparsepack.simulation.options",
    "TraceOptions": "sparsepack.calibrate.trace",
    "UserError": "sparsepack.errors",
    "card": "sparsepack.publish.card:model_card",
    "distil": "sparsepack.calibrate.distillation",
    "evaluate": "sparsepack.eval.run",
    "load": "sparsepack.loading",
    "pack": "sparsepack.packing",
    "place": "sparsepack.placing",
    "prune": "sparsepack.calibrate.pruning",
    "push": "sparsepack.publish.hub",
    "quickstart": "sparsepack.quickstarting",
    "records": "sparsepack.files.records",
    "report": "sparsepack.publish.page:report_page",
    "rotate": "sparsepack.calibrate.rotation",
    "run": "sparsepack.recipe.run:run_recipe",
    "simulate": "sparsepack.simulation.run",
    "thresholds": "sparsepack.calibrate.find_thresholds:make_thresholds",
    "trace": "sparsepack.calibrate.tracing",
    "verify": "sparsepack.formats.verify",
}
"""The module of each name, and after a colon what the name is called there where that is another."""


def __getattr__(name: str) -> Any:
    if name == "calibrate":  # the package, which is called as the function
        return import_module("sparsepack.calibrate")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, function = _HOMES[name].partition(":")
    value = getattr(import_module(home), function or name)
    globals()[name] = value
    return value


_register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
