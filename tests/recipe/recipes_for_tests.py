"""A recipe of tiny sizes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepack.errors import RecipeError
from sparsepack.recipe.load import load_recipe
from sparsepack.recipe.run import RecipeOutcome

TINY: dict[str, Any] = {
    "schema": 1,
    "name": "tiny",
    "model": "shipped:tiny",
    "calibrate": {"text": "shipped:train", "context": 64, "samples": 4, "batch": 4},
    "activation_sparsity": {"sparsity": 0.5, "windows": 4},
    "pack": {"format": "zigzag-q4_k", "quantiser": "round"},
    "verify": True,
    "eval": {"perplexity": "shipped:heldout", "protocols": ["decode", "dense"], "context": 64, "windows": 3},
    "generate": {"prompt": "The class", "tokens": 4},
    "gates": {"perplexity_ratio": {"max": 2.0}, "realised_sparsity": {"min": 0.3}, "file_bytes": {"max": 1300000}},
}
STAGES = ("calibrate", "thresholds", "pack", "verify", "eval", "generate")


def write_recipe(folder: Path, **changes: Any) -> Path:
    """The tiny recipe as a file, top-level sections replaced by `changes`."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}), encoding="utf-8")
    return path


def ran(outcome: RecipeOutcome) -> list[str]:
    """The stages that ran, and were not up to date."""
    return [stage["name"] for stage in outcome.report["stages"] if stage["status"] == "ran"]


def refused(recipe: Path, *overrides: str) -> str:
    """What is wrong with a recipe and its overrides, in one line, before anything is opened."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
