"""Tell transformers of what we add to it when both are there: `import sparsepack` does not import transformers."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ADDED: Mapping[str, str] = {
    "transformers.quantizers.auto": "sparsepack.integration.transformers.quantizer",
    "transformers.modeling_utils": "sparsepack.integration.transformers.double_sparsity",
}
"""A module of ours registers in the table of transformers that the key names, when the module of transformers is
imported."""

OF_COMMANDS: Mapping[str, str] = {"transformers.utils.import_utils": "sparsepack.integration.transformers.hidden"}
"""Likewise what only commands change."""


def register(added: Mapping[str, str] = ADDED) -> None:
    """Register now what transformers has imported the module of, and the rest when it does."""
    later = {}
    for theirs, ours in added.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
        else:
            later[theirs] = ours
    if later:
        sys.meta_path.insert(0, _Watcher(later))


class _Watcher(MetaPathFinder):
    """Lets the watched modules be found by others, and registers behind the last line of each. Goes when all are."""

    def __init__(self, watched: dict[str, str]) -> None:
        self._watched = watched

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = self._watched.pop(name, None)
        spec = importlib.util.find_spec(name) if ours else None
        if ours is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            importlib.import_module(ours)
            # Not in find_spec: Python is walking through sys.meta_path there.
            if not self._watched and self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
