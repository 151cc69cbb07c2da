"""sparsepack: find where a language model is sparse, pack it so that hardware profits, prove it is the same model.

The functions and types below are what programs use; docs/library.md shows them. Each is imported when it is first
asked for, so that `import sparsepack` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsepack.runtime.registration import register as _register_with_transformers

__version__ = "0.1.0"

__all__ = [
    "AllocationOptions",
    "AttentionOptions",
    "CalibrateOptions",
    "EvalRequest",
    "GenerateOptions",
    "Generated",
    "Generation",
    "Model",
    "PackRequest",
    "PruneOptions",
    "UserError",
    "calibrate",
    "evaluate",
    "load",
    "pack",
    "prune",
    "verify",
]

if TYPE_CHECKING:
    from sparsepack.artifacts.verify import verify
    from sparsepack.calibrate.options import CalibrateOptions
    from sparsepack.calibrate.run import calibrate
    from sparsepack.errors import UserError
    from sparsepack.eval.options import EvalRequest
    from sparsepack.eval.run import evaluate
    from sparsepack.load import Model, load
    from sparsepack.pack import PackRequest, pack
    from sparsepack.prune.options import PruneOptions
    from sparsepack.prune.run import prune
    from sparsepack.runtime.generate import Generated, Generation
    from sparsepack.runtime.options import GenerateOptions
    from sparsepack.sparsity.attention_options import AttentionOptions
    from sparsepack.sparsity.options import AllocationOptions

_PLACES = {
    "AllocationOptions": "sparsepack.sparsity.options",
    "AttentionOptions": "sparsepack.sparsity.attention_options",
    "CalibrateOptions": "sparsepack.calibrate.options",
    "EvalRequest": "sparsepack.eval.options",
    "GenerateOptions": "sparsepack.runtime.options",
    "Generated": "sparsepack.runtime.generate",
    "Generation": "sparsepack.runtime.generate",
    "Model": "sparsepack.load",
    "PackRequest": "sparsepack.pack",
    "PruneOptions": "sparsepack.prune.options",
    "UserError": "sparsepack.errors",
    "evaluate": "sparsepack.eval.run",
    "verify": "sparsepack.artifacts.verify",
}
_VERB_MODULES = ("calibrate", "load", "pack", "prune")
"""Modules of this name that can be called (`verb_module`): the same object, whoever imports it first."""


def __getattr__(name: str) -> Any:
    if name in _VERB_MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


_register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
