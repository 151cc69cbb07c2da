"""Defaults: an option dataclass has them, and the command line and recipes take them from there."""

from dataclasses import MISSING, fields
from typing import Any

import pytest

from sparsepack.bench.options import BenchSettings
from sparsepack.calibrate.options import CalibrateOptions
from sparsepack.cli import main
from sparsepack.eval.options import EvalRequest
from sparsepack.pack import PackRequest
from sparsepack.recipe.schema import RecipeModel
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stages.bench import Bench
from sparsepack.recipe.stages.calibrate import Calibrate
from sparsepack.recipe.stages.eval import Eval
from sparsepack.recipe.stages.generate import Generate
from sparsepack.recipe.stages.pack import Pack
from sparsepack.recipe.stages.thresholds import ActivationSparsity
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.options import ServeOptions
from sparsepack.sparsity.options import AllocationOptions

OPTIONS = {
    "calibrate": (CalibrateOptions,),
    "thresholds": (AllocationOptions,),
    "pack": (PackRequest, AllocationOptions),
    "eval": (EvalRequest,),
    "bench": (BenchSettings,),
    "generate": (GenerateOptions,),
    "serve": (ServeOptions,),
}
SECTIONS = {
    Calibrate: CalibrateOptions,
    ActivationSparsity: AllocationOptions,
    Pack: PackRequest,
    Eval: EvalRequest,
    Bench: BenchSettings,
    Generate: GenerateOptions,
}
RECIPE_NAMES = {"prompt": "n_prompt", "generate": "n_gen"}
NOT_IN_RECIPES = {"protocols": "one protocol each", "text": "the text", "prompt": "the text", "sparsity": "required"}
NOT_ON_THE_COMMAND_LINE = {"recipe"}


def defaults(options: type) -> dict[str, Any]:
    return {field.name: None if field.default is MISSING else field.default for field in fields(options)}


@pytest.mark.parametrize("verb", OPTIONS)
def test_a_verb_has_every_option_of_its_dataclass_with_its_default(verb: str) -> None:
    command = main.commands[verb]
    given = command.make_context(verb, [], resilient_parsing=True).params
    for options in OPTIONS[verb]:
        for name, default in defaults(options).items():
            if name == "threads" and name not in given:
                continue
            if (name not in NOT_ON_THE_COMMAND_LINE and name != "allocation") or options is AllocationOptions:
                assert given[name] == default, f"{verb}, {name}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.key)
def test_a_section_has_the_defaults_of_its_dataclass(section: Any) -> None:
    expected = defaults(SECTIONS[section])
    for name, field in section.model_fields.items():
        if (SECTIONS[section] is BenchSettings or name not in NOT_IN_RECIPES) and not field.is_required():
            assert field.default == expected[RECIPE_NAMES.get(name, name) if section is Bench else name], name


def test_device_and_dtype_are_the_same_everywhere() -> None:
    for options in (CalibrateOptions, AllocationOptions, PackRequest, EvalRequest, BenchSettings):
        for name in ("device", "dtype"):
            assert defaults(options).get(name, Recipe.model_fields[name].default) == Recipe.model_fields[name].default


def test_every_section_of_a_stage_is_compared_here() -> None:
    head = {"version", "name", "description", "model", "device", "dtype", "verify", "gates"}
    assert {section.key for section in SECTIONS} == set(RecipeModel.model_fields) - head
