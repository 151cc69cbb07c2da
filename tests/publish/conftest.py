"""A recipe's run on the shipped tiny model, made once."""

from pathlib import Path

import pytest

from sparsepack.recipe import run_recipe

SMALL = (
    "calibrate.context=128",
    "calibrate.samples=4",
    "eval.context=128",
    "eval.windows=2",
    "bench.prompt=4",
    "bench.generate=4",
    "bench.repetitions=1",
    "generate.tokens=4",
    'gates={"perplexity": {"max": 1000}, "realised_sparsity": {"min": 0.9}}',
)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of the quickstart, made small, with a gate that passes and one that fails."""
    folder = tmp_path_factory.mktemp("run") / "work"
    run_recipe(Path("quickstart"), SMALL, folder)
    return folder
