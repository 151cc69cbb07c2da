"""Sections that do not go together, noticed before anything runs: first those of any model, then of the one at hand."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.artifacts.formats import FORMATS, those_with
from sparsepack.errors import RecipeError
from sparsepack.recipe.schema import FILE_GATES, ROW_GATES, Gates, Recipe

if TYPE_CHECKING:
    from sparsepack.files.text import Text
    from sparsepack.models.checkpoint import Checkpoint


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` for the first contradiction."""
    for problem in _problems(recipe):
        raise RecipeError(problem)


def _problems(recipe: Recipe) -> Iterator[str]:
    activation, pack, evaluation = recipe.activation, recipe.pack, recipe.eval
    format = FORMATS[pack.format] if pack is not None else None
    if recipe.sparse and recipe.calibrate is None:
        yield "activation: thresholds are taken on calibration text; add a calibrate section, or set sparsity to 0"
    if recipe.calibrate is not None and recipe.calibrate.context <= recipe.calibrate.sinks:
        yield f"calibrate.sinks: {recipe.calibrate.sinks}; expected fewer than context, {recipe.calibrate.context}"
    if activation is not None and activation.offsets and activation.allocation != "global":
        yield "activation.offsets: they are learnt from the model's output; expected allocation: global"
    if activation is not None and activation.allocation == "global" and activation.upstream == "dense":
        yield "activation.upstream: global runs the whole sparse model; expected sparse"
    if recipe.sparse and format is not None and not format.thresholds:
        yield (
            f"pack.format: a {format.name} {format.container} has no place for thresholds; "
            f"expected {those_with('thresholds')}, or no activation"
        )
    if recipe.verify and pack is None:
        yield "verify: there is no artifact to verify; add a pack section"
    for name in ("bench", "generate"):
        if getattr(recipe, name) is not None and (format is None or not format.runs):
            yield f"{name}: it runs an artifact; expected a pack section of format {those_with('runs')}"
    if recipe.bench is not None and not recipe.bench.prompt and not recipe.bench.generate:
        yield "bench: prompt and generate are both 0; give one of them tokens"
    if evaluation is not None and not evaluation.perplexity and not evaluation.tasks:
        yield "eval: nothing to evaluate; give it perplexity texts or tasks, or leave it out"
    if evaluation is not None and evaluation.task_path and not Path(evaluation.task_path).is_dir():
        yield f"eval.task_path: {evaluation.task_path} is no folder (relative paths start at the working directory)"
    if recipe.gates is not None:
        yield from _unmeasured(recipe, recipe.gates)


def _unmeasured(recipe: Recipe, gates: Gates) -> Iterator[str]:
    """Gates on what the recipe does not measure."""
    texts = recipe.eval.perplexity if recipe.eval is not None else ()
    tasks = recipe.eval.tasks if recipe.eval is not None else ()
    for name in ROW_GATES:
        if getattr(gates, name) is not None and not texts:
            yield f"gates.{name}: it is not measured; add texts as eval.perplexity"
    if gates.realised_sparsity is not None and (not recipe.sparse or set(recipe.protocols()) == {"dense"}):
        yield "gates.realised_sparsity: nothing runs sparse; expected activation.sparsity above 0, and decode or all"
    for name in FILE_GATES:
        if getattr(gates, name) is not None and recipe.pack is None:
            yield f"gates.{name}: there is no file; add a pack section"
    if gates.verify and not recipe.verify:
        yield "gates.verify: the artifact is not verified; expected verify: true"
    for task in gates.tasks:
        if not any(fnmatch.fnmatch(task, pattern) for pattern in tasks):
            yield f"gates.tasks.{task}: it is not measured; add it to eval.tasks"


@dataclass(frozen=True)
class Sources:
    """What a run reads: the model and its texts. `texts` are those of perplexity."""

    checkpoint: "Checkpoint"
    calibration: "Text | None"
    texts: tuple["Text", ...]


def open_sources(recipe: Recipe) -> Sources:
    """Open the model and read the texts.

    Raises `UserError` subclasses where one cannot be read or the model does not allow what the recipe asks for, so that
    no stage finds that out after hours.
    """
    from sparsepack.files.text import read_text
    from sparsepack.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(recipe.model)
    for problem in _misfits(recipe, checkpoint):
        raise RecipeError(problem)
    calibration = read_text(recipe.calibrate.text) if recipe.calibrate is not None else None
    texts = tuple(read_text(name) for name in recipe.eval.perplexity) if recipe.eval is not None else ()
    return Sources(checkpoint, calibration, texts)


def _misfits(recipe: Recipe, checkpoint: "Checkpoint") -> Iterator[str]:
    from sparsepack.runtime.generate import open_tokenizer, prompt_tokens
    from sparsepack.sparsity.allocation import sparse_sites

    if recipe.device != "cpu" and not _available(recipe.device):
        yield f"device: {recipe.device}; torch finds none on this machine, use cpu"
    longest = int(checkpoint.config.max_position_embeddings)
    asked = {}
    if recipe.calibrate is not None:
        asked["calibrate.context"] = recipe.calibrate.context
    if recipe.eval is not None and recipe.eval.perplexity:
        asked["eval.context"] = recipe.eval.context
    if recipe.bench is not None:
        asked |= {"bench.prompt": recipe.bench.prompt, "bench.generate": recipe.bench.generate}
    if recipe.generate is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer_json())
        prompt = len(prompt_tokens(tokenizer, recipe.generate.prompt, checkpoint.tokenizer.bos_token_id))
        asked["generate, prompt and tokens,"] = prompt + recipe.generate.tokens
    for name, tokens in asked.items():
        if tokens > longest:
            yield f"{name}: {tokens} tokens; {checkpoint.name} was made for at most {longest}"
    if recipe.activation is not None:
        sparse_sites(checkpoint, recipe.activation.include, recipe.activation.ignore)


def _available(device: str) -> bool:
    import torch

    if device == "mps":
        return torch.backends.mps.is_available()
    return int(device.partition(":")[2] or 0) < torch.cuda.device_count()
