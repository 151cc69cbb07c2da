"""Defaults, limits and help: an option dataclass has them, the command line and recipes take them from there.

Nothing is listed here: what is compared is found by walking click's parameters and pydantic's fields.
"""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import click
import pytest

from sparsepack.calibrate.thresholds import ThresholdsOptions
from sparsepack.cli import main
from sparsepack.cli.command import Declared
from sparsepack.option import Option, default_of, options_of
from sparsepack.packing import PackRequest
from sparsepack.quickstarting import QuickstartOptions
from sparsepack.recipe.schema import RecipeModel, section_in
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stages import STAGES
from sparsepack.runtime.options import EngineOptions

FIRST = {stage.key: stage for stage in reversed(STAGES)}.values()
"""Of stages that are asked for by one key, the one that has the name of a verb."""
SECTIONS = {stage.name: found for stage in FIRST if (found := section_in(stage.type)) is not None}
DATACLASSES = [(stage, options) for stage, section in SECTIONS.items() for options in (section.options, *section.also)]
OF_VERBS = [(stage, options) for stage, options in DATACLASSES if stage in main.commands]
"""A stage without a verb of its name has its options alone."""
LEFT_OUT = {
    EngineOptions: {"backend", "context", "dense", "offload", "threads"},
    PackRequest: {"bits", "kl", "loss"},  # a recipe has thresholds in a section of their own
    ThresholdsOptions: {"format"},  # which in a recipe that of the artifact is
}
"""Of options that a section has some of, those that others may have, or the command line alone."""
HEAD = Recipe.model_fields.keys()


def given(verb: str) -> dict[str, Any]:
    """What a verb is asked for when the user says nothing."""
    return main.commands[verb].make_context(verb, [], resilient_parsing=True).params


def declared(verb: str) -> list[Declared]:
    return [parameter for parameter in main.commands[verb].params if isinstance(parameter, Declared)]


def on_the_command_line(verb: str, options: type) -> set[str]:
    return {str(parameter.name) for parameter in declared(verb) if parameter.options is options}


def shared_with(section: type[Section], options: type) -> set[str]:
    """The keys that a section has of an option dataclass; those of its own come first."""
    own = set() if options is section.options else {field.name for field in fields(section.options)}
    return section.model_fields.keys() & {field.name for field in fields(options)} - own


EVERY = [(verb, parameter) for verb in main.commands for parameter in declared(verb)]


@pytest.mark.parametrize("verb", main.commands)
def test_what_no_dataclass_declares_decides_nothing(verb: str) -> None:
    names = {parameter.name for parameter in declared(verb)}
    others = {name: value for name, value in given(verb).items() if name not in names}
    assert {name: value for name, value in others.items() if value not in (None, False, (), "")} == {}


@pytest.mark.parametrize("verb", main.commands)
def test_options_of_a_verb_have_the_defaults_and_the_limits_of_their_dataclasses(verb: str) -> None:
    for parameter in declared(verb):
        name = str(parameter.name)
        assert given(verb).get(name) == (default_of(parameter.options, name) if parameter.expose_value else None)
        limits = options_of(parameter.options).get(name, Option(""))
        if isinstance(parameter.type, click.Choice):
            assert {*parameter.type.choices} - {"auto"} == {*limits.choices} - {"auto"}
        elif isinstance(parameter.type, click.IntRange | click.FloatRange):
            low = limits.least if limits.above is None else limits.above
            high = limits.most if limits.below is None else limits.below
            assert (parameter.type.min, parameter.type.max) == (low, high)
            assert (parameter.type.min_open, parameter.type.max_open) == (
                limits.above is not None,
                limits.below is not None,
            )


@pytest.mark.parametrize(("stage", "options"), DATACLASSES)
def test_a_section_has_the_defaults_and_the_help_of_its_dataclass(stage: str, options: type) -> None:
    section = SECTIONS[stage]
    shared = shared_with(section, options)
    assert shared, "a section without options of its own has nothing that the command line could have too"
    for name in shared:
        field = section.model_fields[name]
        assert (None if field.is_required() else field.default) == default_of(options, name), name
        assert field.description == options_of(options)[name].help, name


@pytest.mark.parametrize(("stage", "options"), OF_VERBS)
def test_a_stage_and_the_verb_of_its_name_have_the_same_options(stage: str, options: type) -> None:
    section = SECTIONS[stage]
    keys = section.model_fields.keys() | HEAD
    verb = on_the_command_line(stage, options)
    # A list in a recipe, given once for each run on the command line, has the plural of its name.
    left_out = LEFT_OUT.get(options, set())
    assert {name for name in verb if not {name, f"{name}s"} & keys} - left_out == set(), "not in recipes"
    shared = shared_with(section, options)
    also = {name for each in declared(stage) for name in [each.name] if each.options is not options}
    assert (shared | options_of(options).keys() - left_out) - verb - also == set(), "not on the command line"


def test_a_stage_that_does_a_verb_again_has_the_section_of_the_first() -> None:
    again = [stage for stage in STAGES if stage not in FIRST]
    assert {stage.name: stage.key for stage in again} == {
        "calibrate_rotated": "calibrate",
        "calibrate_distilled": "calibrate",
        "calibrate_pruned": "calibrate",
        "eval_pruned": "eval",
    }
    assert all(stage.type == SECTIONS[stage.key] | None for stage in again)


def test_device_and_dtype_are_the_same_everywhere() -> None:
    every = {section.options for section in SECTIONS.values()} | {each.options for _, each in EVERY}
    for options in every - {QuickstartOptions}:  # which chooses a device
        for name in {field.name for field in fields(options)} & {"device", "dtype"}:
            assert default_of(options, name) == Recipe.model_fields[name].default


def test_every_key_of_a_recipe_says_what_it_means() -> None:
    sections = {
        name: found for name, field in RecipeModel.model_fields.items() if (found := section_in(field.annotation))
    }
    assert [name for name, section in sections.items() if not section.__doc__] == []
    keys = {("", name): field for name, field in RecipeModel.model_fields.items() if name not in sections}
    keys |= {(place, name): field for place, each in sections.items() for name, field in each.model_fields.items()}
    assert [place for place, field in keys.items() if not field.description] == []


def test_option_dataclasses_and_the_command_line_need_no_pydantic() -> None:
    """As on a machine with a GPU that has torch and little else."""
    modules = {each.options.__module__ for _, each in EVERY} | {"sparsepack.cli"}
    script = f"import sys; sys.modules['pydantic'] = None; import {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", script], check=True)
