"""sparsepack: find where a language model is sparse, pack it so that hardware profits, prove it is the same model.

The functions and types below are what programs use; docs/library.md shows them. Each is imported when it is first
asked for, so that `import sparsepack` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsepack.integration.transformers.registration import register as _register_with_transformers
from sparsepack.version import __version__ as __version__

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
    from sparsepack.calibration.options import CalibrateOptions
    from sparsepack.calibration.run import calibrate
    from sparsepack.errors import UserError
    from sparsepack.eval.options import EvalRequest
    from sparsepack.eval.run import evaluate
    from sparsepack.formats.verify import verify
    from sparsepack.loading import Model, load
    from sparsepack.packing import PackRequest, pack
    from sparsepack.pruning.options import PruneOptions
    from sparsepack.pruning.run import prune
    from sparsepack.runtime.generate import Generated, Generation
    from sparsepack.runtime.options import GenerateOptions
    from sparsepack.sparsity.attention_options import AttentionOptions
    from sparsepack.sparsity.options import AllocationOptions

_HOMES = {
    "AllocationOptions": "sparsepack.sparsity.options",
    "AttentionOptions": "sparsepack.sparsity.attention_options",
    "CalibrateOptions": "sparsepack.calibration.options",
    "EvalRequest": "sparsepack.eval.options",
    "GenerateOptions": "sparsepack.runtime.options",
    "Generated": "sparsepack.runtime.generate",
    "Generation": "sparsepack.runtime.generate",
    "Model": "sparsepack.loading",
    "PackRequest": "sparsepack.packing",
    "PruneOptions": "sparsepack.pruning.options",
    "UserError": "sparsepack.errors",
    "calibrate": "sparsepack.calibration.run",
    "evaluate": "sparsepack.eval.run",
    "load": "sparsepack.loading",
    "pack": "sparsepack.packing",
    "prune": "sparsepack.pruning.run",
    "verify": "sparsepack.formats.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


_register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
