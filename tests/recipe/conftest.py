"""What the tests of recipes share: a recipe of tiny sizes, and a work folder in which it has been run once."""

import shutil
from pathlib import Path

import pytest
from brief_search import orders_are_searched_briefly
from recipes_for_tests import write_recipe

from sparsepack.recipe import run_recipe

__all__ = ["orders_are_searched_briefly"]


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory):
    """(recipe, work folder, outcome) of one whole run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder)
    return recipe, folder / "work", run_recipe(recipe, work=folder / "work")


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of that work folder, times of change kept."""
    return Path(shutil.copytree(finished_once[1], tmp_path / "work"))
