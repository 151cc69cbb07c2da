"""Tell transformers of our quantizer when both are there: `import sparsepack` alone does not import transformers."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WATCHED = "transformers.quantizers.auto"


def register() -> None:
    """Register now where transformers is imported, else when it will be."""
    if _WATCHED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _register() -> None:
    from sparsepack.runtime.slide import quantizer  # noqa: F401  (its decorators do it)


class _Watcher(MetaPathFinder):
    """Lets the watched module be found by others, and registers behind its last line."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
