"""`python -m sparsepack.integration.lm_eval`: lm-eval's own command line, which knows the model `sparsepack`.

lm-eval 0.4.13 takes its models from a closed table and reads no entry points, so the model is added to that table
before the command line starts. Releases that read the entry point group `lm_eval.models` find it without this module.
"""

from pathlib import Path

import lm_eval.evaluator
import lm_eval.models  # fills the table, which it would not do once something is in it
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.loggers.utils import get_commit_from_path

NAME, TARGET = "sparsepack", "sparsepack.integration.lm_eval.plugin:SparsepackLM"


def commit_of_working_folder() -> str | None:
    """Return the commit of the repository that the working folder is in, None where it is in none.

    lm-eval's own function runs git, which complains where there is no repository, and obeys what a stranger's folder
    sets.
    """
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), None)
    return None if root is None else get_commit_from_path(root)


def main() -> None:
    """Register the model by its name, which imports no model code yet, and run lm-eval's command line."""
    lm_eval.evaluator.get_git_commit_hash = commit_of_working_folder
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
    cli_evaluate()


if __name__ == "__main__":
    main()
