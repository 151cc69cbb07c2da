"""Commands do without what transformers imports wherever it is installed, though no command needs it: torchvision is
for pictures, scikit-learn for one way of guessing tokens, and importing them takes longer than importing all the rest.
A torchvision that was built for another torch would even end the import of a model.

Imported behind `transformers.utils.import_utils`, by commands alone: to a program that imports sparsepack both are
there. transformers looks for each package once, and this is when: they cannot be found meanwhile. Whoever imports them
afterwards, as lm-eval does scikit-learn, finds them.
"""

import sys

from transformers.utils import import_utils

PACKAGES = ("scipy", "sklearn", "torchvision")
"""transformers takes these for not installed."""

_not_imported = [name for name in PACKAGES if name not in sys.modules]
try:
    sys.modules.update(dict.fromkeys(_not_imported))  # type: ignore[arg-type]  # None: Python finds no such module
    for _name in _not_imported:
        getattr(import_utils, f"is_{_name}_available", bool)()  # which remembers what it says
finally:
    for _name in _not_imported:
        del sys.modules[_name]
