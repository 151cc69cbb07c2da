"""Recipes that are no accident: one line, at once."""

import time

import pytest
from recipes_for_tests import write_recipe

from sparsepack.errors import RecipeError
from sparsepack.recipe.load import load_recipe, read_yaml


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)])


HOSTILE = {
    "alias bomb": (bomb(30), r"more than 10,000 values"),
    "merge bomb": (
        "\n".join(
            ["a0: &a0 {k: v}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
        ),
        r"more than 10,000 values",
    ),
    "itself": ("name: &a [*a]", r"line 1: a value that holds itself"),
    "itself as a mapping": ("name: &a {x: *a}", r"holds itself"),
    "a date as key": ("2020-01-01: x", r"2020-01-01: unknown key"),
    "bytes as key": ("!!binary aGVsbG8=: x", r"line 1: .*binary"),
    "a number as key": ("gates: {tasks: {1: {}}}", r"line 1: the key 1 is a number"),
    "a list as key": ("? [a, b]\n: x", r"line 1: a key that is a list"),
    "nothing as key": ("~: x", r"is nothing"),
    "bytes": ("name: !!binary aGVsbG8=", r"line 1: binary"),
    "a set": ("name: !!set {a, b}", r"a set"),
    "5,000 digits": (f"schema: {'9' * 5000}", r"not YAML"),
    "5,000 hexadecimal digits": (f"schema: 0x{'f' * 5000}", r"whole number of 20000 bits"),
    "5,000 digits to the base of 60": (f"schema: {'59:' * 5000}59", r"bits"),
    "nested": ("[" * 5000, r"nested too deeply"),
    "two megabytes": ("#" * (2 << 20), r"characters; expected at most"),
    "another tag": ("name: !!python/object/apply:os.system [ls]", r"line 1: not YAML"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_recipe_is_one_line_at_once(text, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 1


def test_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RecipeError, match="expected a YAML file as people write it"):
        load_recipe(path)


def test_hostile_overrides_are_one_line(tmp_path):
    for value in ("0x" + "f" * 5000, "&a [*a]", "!!binary aGVsbG8=", "{2020-01-01: 1}"):
        with pytest.raises(RecipeError, match="--set") as caught:
            load_recipe(write_recipe(tmp_path), [f"name={value}"])
        assert "\n" not in str(caught.value)


def test_aliases_and_dates_are_fine_where_they_are_few():
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}\nd: 2020-01-01\n"
    values = {"x": 1, "y": [1, 2]}
    assert read_yaml(text, "here") == {"a": values, "b": values, "c": {**values, "x": 2}, "d": "2020-01-01"}
