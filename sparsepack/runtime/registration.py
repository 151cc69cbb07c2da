"""Tell transformers of what we add to it when both are there: `import sparsepack` does not import transformers."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ADDED: Mapping[str, str] = {
    "transformers.quantizers.auto": "sparsepack.runtime.slide.quantizer",
    "transformers.modeling_utils": "sparsepack.runtime.double.attention",
}
"""Where transformers keeps a table, and which module of ours registers in it when it is imported."""


def register() -> None:
    """Register now what transformers has imported the table of, and the rest when it does."""
    later = {}
    for table, ours in _ADDED.items():
        if _is_whole(table):
            importlib.import_module(ours)
        else:
            later[table] = ours
    if later and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(later))


def _is_whole(name: str) -> bool:
    """Whether a module has been imported to its last line. torch imports us at the end of its own import
    (`eval.lm_eval_registration`), which may be the first import of a module of transformers."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _Watcher(MetaPathFinder):
    """Lets the watched modules be found by others, and registers behind the last line of each; of one that had begun
    before it was watched, behind that of the next module of transformers. Goes when all are registered."""

    def __init__(self, watched: dict[str, str]) -> None:
        self._watched = watched

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("transformers."):
            return None
        due = [self._watched.pop(table) for table in list(self._watched) if table == name or _is_whole(table)]
        spec = importlib.util.find_spec(name) if due else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            for ours in due:
                importlib.import_module(ours)
            # Not in find_spec: Python is walking through sys.meta_path there.
            if not self._watched and self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
