"""The stages of a run: calibrate -> thresholds -> pack -> verify -> eval -> bench -> generate.

Each stage reads its settings and the outputs of the stages it needs, and leaves files in the work folder. A stage whose
fingerprint and outputs are unchanged is skipped; a changed one runs again with everything that needs it.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsepack import __version__
from sparsepack.errors import UserError
from sparsepack.files.hashing import sha256_bytes, sha256_file
from sparsepack.recipe import actions
from sparsepack.recipe.consistency import Sources
from sparsepack.recipe.console import say
from sparsepack.recipe.schema import Recipe
from sparsepack.recipe.state import WorkFolder
from sparsepack.runtime.cpu.dispatch import instruction_set
from sparsepack.runtime.cpu.machine import cpu_info

_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Stage:
    """One stage.

    settings -- everything its outputs depend on besides the stages in `needs`, JSON-able
    outputs  -- the files it leaves, relative to the work folder
    """

    name: str
    settings: Mapping[str, Any]
    needs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """How a stage went: "ran" or "up to date", and the seconds it took, now or back then."""

    name: str
    status: str
    seconds: float


def stages_of(recipe: Recipe, sources: Sources, folder: Path) -> list[Stage]:
    """The stages that the recipe asks for, in order."""
    made: list[Stage] = []
    checkpoint = sources.checkpoint
    shared = {
        "versions": {"sparsepack": __version__, **{name: importlib.metadata.version(name) for name in _LIBRARIES}},
        "model": {
            "name": recipe.model,
            "sha256": checkpoint.sha256,
            "config": checkpoint.config.to_dict(),
            "tokenizer": sha256_bytes(checkpoint.tokenizer_json().encode()),
        },
        "device": recipe.device,
        "dtype": recipe.dtype,
    }

    def add(name: str, action: Callable[..., None], settings: Mapping[str, Any], needs: str, *outputs: str) -> None:
        there = {stage.name for stage in made}
        needed = tuple(need for need in needs.split() if need in there)
        run = partial(action, recipe, sources, folder)
        made.append(Stage(name, {**shared, **settings}, needed, outputs, run))

    asked = recipe.to_json()
    texts = [text.sha256 for text in sources.texts]
    if recipe.calibrate is not None and sources.calibration is not None:
        settings = {**asked["calibrate"], "text_sha256": sources.calibration.sha256}
        add("calibrate", actions.run_calibrate, settings, "", *actions.CALIBRATION_FILES)
    if recipe.sparse:
        add("thresholds", actions.run_thresholds, asked["activation"], "calibrate", actions.THRESHOLDS)
    if recipe.pack is not None:
        provenance = actions.provenance(recipe)
        add("pack", actions.run_pack, provenance, "thresholds", actions.ARTIFACT, actions.DESCRIPTION)
    if recipe.verify:
        add("verify", actions.run_verify, {}, "pack", actions.VERIFICATION)
    if recipe.eval is not None:
        settings = {**asked["eval"], "protocols": recipe.protocols(), "texts_sha256": texts}
        settings["task_files"] = _hashes(recipe.eval.task_path)
        settings["lm_eval"] = importlib.metadata.version("lm_eval") if recipe.eval.tasks else None
        add("eval", actions.run_eval, settings, "thresholds pack", actions.EVALUATION)
    if recipe.bench is not None:
        machine = {"cpu": cpu_info(), "threads": torch.get_num_threads(), "runs": _what_runs()}
        settings = {**asked["bench"], "text_sha256": texts[:1], "machine": machine}
        add("bench", actions.run_bench, settings, "pack", actions.BENCHMARK)
    if recipe.generate is not None:
        add("generate", actions.run_generate, asked["generate"], "pack", actions.GENERATED)
    return made


def _what_runs() -> str:
    """The instruction set of the CPU's kernels, "reference" without them: a bench of one says nothing of the other."""
    try:
        return instruction_set()
    except UserError:
        return "reference"


def pending(stages: Iterable[Stage], work: WorkFolder) -> set[str]:
    """The stages that would run: those that changed, and all that need one of them."""
    stale: set[str] = set()
    for stage in stages:
        fresh = not stale & set(stage.needs)
        if not fresh or not work.current(stage.name, work.fingerprint(stage.settings, stage.needs)):
            stale.add(stage.name)
    return stale


def run_stages(stages: Iterable[Stage], work: WorkFolder) -> list[Outcome]:
    """Run what is not up to date, saying so on stderr; the state is saved after every stage."""
    work.create()
    outcomes = []
    for stage in stages:
        mark = work.fingerprint(stage.settings, stage.needs)
        if work.current(stage.name, mark):
            known = work.finished(stage.name)
            say(f"{stage.name}: up to date (took {known.seconds:.1f} s)")
            outcomes.append(Outcome(stage.name, "up to date", known.seconds))
            continue
        say(f"{stage.name}: running")
        start = time.perf_counter()
        stage.run()
        seconds = time.perf_counter() - start
        work.finish(stage.name, mark, seconds, stage.outputs)
        say(f"{stage.name}: done in {seconds:.1f} s")
        outcomes.append(Outcome(stage.name, "ran", seconds))
    return outcomes


def _hashes(task_path: str | None) -> dict[str, str]:
    """Of the files in the task folder; data that they name elsewhere is not looked at."""
    if task_path is None:
        return {}
    return {str(path): sha256_file(path) for path in sorted(Path(task_path).rglob("*")) if path.is_file()}
