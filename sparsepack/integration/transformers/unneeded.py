"""Commands do without what transformers imports wherever it is installed, though no command needs it: torchvision is
for pictures, scikit-learn for one way of guessing tokens, and importing them takes longer than importing all the rest.

Imported behind `transformers.utils.import_utils`, by commands alone: to a program that imports sparsepack both are
there. lm-eval, which needs scikit-learn, imports it itself.
"""

from typing import Any

from transformers.utils import import_utils

UNNEEDED = ("scipy", "sklearn", "torchvision")
"""transformers takes these for not installed."""

_NO_PACKAGE = "sparsepack_no_such_package"

if hasattr(import_utils, "_is_package_available"):  # else they are imported, which is slower and no worse
    _look_for = import_utils._is_package_available

    def _without_unneeded(name: str, *how: Any, **more: Any) -> Any:
        return _look_for(_NO_PACKAGE if name in UNNEEDED else name, *how, **more)

    import_utils._is_package_available = _without_unneeded
