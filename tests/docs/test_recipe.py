"""docs/recipe.md is what the schema says, and the schema accepts what is shipped."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsepack.cli import main
from sparsepack.recipe.load import FOLDER, load_recipe
from sparsepack.recipe.schema import RecipeModel, json_schema, markdown, section_in

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_what_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "sparsepack run --schema markdown > docs/recipe.md"


def test_every_key_of_every_section_is_on_the_page() -> None:
    page = markdown()
    for name, field in RecipeModel.model_fields.items():
        section = section_in(field.annotation)
        rows = page.partition(f"## `{name}`\n" if section else "## At the top\n")[2].partition("\n## ")[0]
        for key, inner in section.model_fields.items() if section else [(name, field)]:
            assert f"| `{inner.alias or key}` |" in rows


def test_run_prints_the_schema_without_a_recipe() -> None:
    found = CliRunner().invoke(main, ["run", "--schema"])
    assert (found.exit_code, json.loads(found.output)) == (0, json_schema())
    assert CliRunner().invoke(main, ["run", "--schema", "markdown"]).output == markdown()


@pytest.mark.parametrize(
    "name", ["quickstart", "ci", "teal50", "global50", "best50", "prune-6of8-zigzag50", "relu-neurons"]
)
def test_the_json_schema_has_the_keys_of_shipped_recipes(name: str) -> None:
    given = load_recipe(FOLDER / f"{name}.yaml", ["model=shipped:tiny"]).to_json()
    assert given.keys() == json_schema()["properties"].keys()
    for key, section in json_schema()["$defs"].items():
        value = given.get({"ActivationSparsity": "activation_sparsity"}.get(key, key.lower()))
        if isinstance(value, dict):
            assert value.keys() == section["properties"].keys()
