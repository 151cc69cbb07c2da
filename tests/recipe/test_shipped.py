"""The ready-made recipes: one copy, found by name from a checkout and from an installed wheel."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import sparsepack
from sparsepack.cli import main
from sparsepack.recipe.load import FOLDER, load_recipe, locate, shipped_recipes

ROOT = Path(__file__).parents[2]


def test_names_are_the_files_of_the_repository_but_for_the_workflow() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} - set(shipped_recipes()) == {"github-workflow"}
    assert Path("recipes") / "quickstart.yaml" == FOLDER.relative_to(ROOT) / locate(Path("quickstart")).name
    assert not list(Path(sparsepack.__file__).parent.rglob("*.yaml"))


def test_run_lists_them_with_what_they_are_for() -> None:
    result = CliRunner().invoke(main, ["run", "--list"])
    assert result.exit_code == 0
    *lines, place = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert str(FOLDER) in place
    assert all(load_recipe(Path(name), ["model=m"]).description in result.stdout for name in shipped_recipes())


def test_a_recipe_that_may_be_set_to_another_model_names_none() -> None:
    for name in shipped_recipes():
        assert "shipped" not in load_recipe(Path(name), ["model=m"]).description


@pytest.mark.slow
def test_a_wheel_holds_them_and_says_that_it_is_typed(tmp_path: Path) -> None:
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("no scikit_build_core to build a wheel with")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-C", "wheel.cmake=false", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "sparsepack"
    assert (package / "py.typed").is_file()
    assert (package / "__main__.py").is_file()
    for path in shipped_recipes().values():
        assert (package / "recipes" / path.name).read_bytes() == path.read_bytes()
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
    code += "from sparsepack.recipe.load import FOLDER; print(FOLDER)"
    found = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": found}
    here = {"cwd": tmp_path, "env": environment, "text": True, "check": True, "capture_output": True}
    done = subprocess.run([sys.executable, "-c", code], **here)
    assert done.stdout.strip() == str(package / "recipes")
    listed = subprocess.run([sys.executable, "-m", "sparsepack", "run", "--list"], **here)
    assert "quickstart" in listed.stdout
