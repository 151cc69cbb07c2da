"""Make `lm_eval --model sparsepack` known to a release of lm-eval that does not look for models of other packages.

lm-eval 0.4.13 takes its models from a table of its own and imports nothing that a user could name. What it does import
is torch, to seed it before it takes the model, and torch calls each entry point of the group `torch.backends` at the
end of its own import. Ours does nothing unless lm-eval is what imports it. Once lm-eval reads the group
`lm_eval.models` itself, this file can go.
"""

import sys

NAME, TARGET = "sparsepack", "sparsepack.eval.lm_eval_plugin:SparsepackLM"
LAST_WITHOUT_PLUGINS = (0, 4, 13)


def register() -> None:
    """Add the model to lm-eval's table, by name, where lm-eval is running and needs it; imports no model code.

    Never raises: torch's import would fail with it.
    """
    if "lm_eval" not in sys.modules:
        return
    try:
        import lm_eval
        import lm_eval.models  # the table of its own models, which it fills only while it is empty
        from lm_eval.api.registry import model_registry

        version = tuple(int(part) for part in lm_eval.__version__.split(".")[:3])
        if version <= LAST_WITHOUT_PLUGINS and NAME not in model_registry:
            model_registry.register(NAME, target=TARGET)
    except Exception as error:
        print(f"sparsepack: cannot make itself known to lm-eval ({error})", file=sys.stderr)
