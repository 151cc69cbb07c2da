"""The CI workflow, copied as it stands into somebody's repository: its shell steps run, its cache keys name files."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepack.recipe.load import FOLDER

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]

PARSE = """
import sys
from sparsepack.cli import main
from sparsepack.recipe.load import load_recipe
verb = main.commands[sys.argv[1]]
asked = verb.make_context(verb.name, sys.argv[2:]).params
load_recipe(asked['recipe'], asked['overrides'])
open(asked['json_path'], 'w').close()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with the workflow and a recipe, copied as the workflow's first lines say, and nothing else."""
    folder = tmp_path / "repository"
    (folder / ".github" / "workflows").mkdir(parents=True)
    (folder / "recipes").mkdir()
    shutil.copy(FOLDER / "github-workflow.yaml", folder / ".github" / "workflows" / "sparsepack.yaml")
    shutil.copy(FOLDER / "ci.yaml", folder / "recipes" / "ci.yaml")
    for command in (("init", "-q"), ("add", "-A")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.fixture
def workflow(repository: Path) -> dict[str, Any]:
    return yaml.safe_load((repository / ".github" / "workflows" / "sparsepack.yaml").read_text())


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    return job["steps"]


def using(workflow: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [step for step in steps(workflow) if step.get("uses", "").partition("@")[0] == action]


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_shell_steps(repository: Path, workflow: dict[str, Any], status: int) -> tuple[int, str]:
    """Run every `run:` step as a runner of GitHub's does, until one fails: `bash -e -o pipefail`.

    `pip` says what it was given; `sparsepack` reads arguments and recipe as the real one, and then ends with `status`.
    """
    tools = repository.parent / "tools"
    tools.mkdir(exist_ok=True)
    command(tools, "pip", 'printf "pip %s\\n" "$*"')
    command(tools, "sparsepack", f'"{sys.executable}" -c "{PARSE}" "$@" || exit 70\nexit {status}')
    environment = {**os.environ, **workflow["env"], "PATH": f"{tools}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    said = ""
    for step in steps(workflow):
        if "run" in step:
            assert "${{" not in step["run"], "a shell does not know GitHub's expressions"
            shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(shell, cwd=repository, env=environment, capture_output=True, text=True)
            said += done.stdout
            if done.returncode:
                return done.returncode, said + done.stderr
    return 0, said


@pytest.mark.parametrize(
    ("status", "expected"), [(0, ""), (3, "::a gate failed"), (2, "the run itself broke (exit 2)"), (1, "(exit 1)")]
)
def test_the_shell_steps_run_and_pass_the_exit_status_on(repository, workflow, status, expected):
    found, said = run_shell_steps(repository, workflow, status)
    assert found == status, said
    assert expected in said
    assert ("::error" in said) == bool(status)
    assert (repository / "report.json").is_file()
    (upload,) = using(workflow, "actions/upload-artifact")
    assert (upload["if"], upload["with"]["path"]) == ("always()", "report.json")


def test_what_is_installed_is_sparsepack_and_not_the_users_repository(repository, workflow):
    _, said = run_shell_steps(repository, workflow, 0)
    (installed,) = [line.split() for line in said.splitlines() if line.startswith("pip ")]
    assert installed[:3] == ["pip", "install", PROJECT]
    assert "." not in installed


def test_every_file_that_a_key_hashes_is_there(repository, workflow):
    text = (repository / ".github" / "workflows" / "sparsepack.yaml").read_text()
    hashed = [
        pattern for call in re.findall(r"hashFiles\(([^)]*)\)", text) for pattern in re.findall(r"'([^']*)'", call)
    ]
    python = using(workflow, "actions/setup-python")[0]["with"]
    assert hashed
    assert python["cache"] == "pip"
    for pattern in (*hashed, python["cache-dependency-path"], workflow["env"]["RECIPE"]):
        assert list(repository.glob(pattern)), pattern


def test_the_cache_is_restored_from_older_runs_and_saved_though_a_gate_failed(workflow):
    (restore,), (save,) = (using(workflow, f"actions/cache/{what}") for what in ("restore", "save"))
    assert not using(workflow, "actions/cache"), "which saves nothing when a step fails"
    prefixes = restore["with"]["restore-keys"].split("\n")
    assert all(restore["with"]["key"].startswith(prefix) for prefix in prefixes)
    assert save["if"] == "always()"
    assert save["with"] == {name: restore["with"][name] for name in ("path", "key")}
    assert "github.run_id" in save["with"]["key"], "a key is written once: one that stays would keep the first run's"
    (judged,) = [step for step in steps(workflow) if "sparsepack run" in step.get("run", "")]
    assert steps(workflow).index(restore) < steps(workflow).index(judged) < steps(workflow).index(save)
    assert save["with"]["path"] == "work"  # where `run` puts it, seen from the repository
