"""`python -m sparsepack.integration.lm_eval`: lm-eval's own command line, which knows the model `sparsepack`.

lm-eval 0.4.13 takes its models from a closed table and reads no entry points, so the model is added to that table
before the command line starts. Releases that read the entry point group `lm_eval.models` find it without this module.
"""

import lm_eval.models  # noqa: F401  -- fills the table, which it would not do once something is in it
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

NAME, TARGET = "sparsepack", "sparsepack.integration.lm_eval.plugin:SparsepackLM"


def main() -> None:
    """Register the model by its name, which imports no model code yet, and run lm-eval's command line."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
    cli_evaluate()


if __name__ == "__main__":
    main()
