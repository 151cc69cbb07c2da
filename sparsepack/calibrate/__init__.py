"""What is done to a model before it is packed: statistics, thresholds, another basis, pruning, training, fitting.

`sparsepack.calibrate` is Python's name of the function `collection.calibrate`, too: the package is called as that.
"""

import sys
from types import ModuleType
from typing import Any


class _Calibrate(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        from sparsepack.calibrate.collection import calibrate

        return calibrate(*args, **settings)


sys.modules[__name__].__class__ = _Calibrate
