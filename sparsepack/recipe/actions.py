"""What each stage does: from the recipe and files in the work folder to files in the work folder."""

from pathlib import Path
from typing import Any

from sparsepack.calibrate import folder as calibration_folder
from sparsepack.calibrate.run import CalibrateOptions, calibrate
from sparsepack.files.atomic import write_json
from sparsepack.files.resume import state_beside
from sparsepack.models.families import SITES
from sparsepack.pack import PackRequest, pack
from sparsepack.recipe.consistency import Sources
from sparsepack.recipe.console import say
from sparsepack.recipe.schema import Recipe
from sparsepack.sparsity.allocation import sparse_sites, weights_of
from sparsepack.sparsity.options import AllocationOptions

CALIBRATION = "calibration"
CALIBRATION_FILES = (f"{CALIBRATION}/calibration.json", f"{CALIBRATION}/calibration.safetensors")
THRESHOLDS, ARTIFACT, DESCRIPTION = "thresholds.json", "model.gguf", "pack.json"
VERIFICATION, EVALUATION, BENCHMARK, GENERATED = "verify.json", "eval.json", "bench.json", "generate.json"


def calibrate_options(recipe: Recipe) -> CalibrateOptions:
    """The calibrate section as its options."""
    assert recipe.calibrate is not None
    values = recipe.calibrate.model_dump(exclude={"text"})
    return CalibrateOptions(**values, device=recipe.device, dtype=recipe.dtype)


def allocation_options(recipe: Recipe) -> AllocationOptions:
    """The activation section as its options."""
    assert recipe.activation is not None
    return AllocationOptions(**recipe.activation.model_dump(), device=recipe.device, dtype=recipe.dtype)


def provenance(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that the artifact depends on, for its manifest."""
    return {key: recipe.to_json()[key] for key in ("name", "model", "dtype", "calibrate", "activation", "pack")}


def run_calibrate(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """Statistics over the calibration text; a run that was killed within goes on where it stopped."""
    assert sources.calibration is not None
    options = calibrate_options(recipe)
    calibrate(sources.checkpoint, sources.calibration, folder / CALIBRATION, options, overwrite=True)


def run_thresholds(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """The thresholds table; a run that was killed within goes on where it stopped."""
    from sparsepack.sparsity.find import find_thresholds

    calibration = calibration_folder.load(folder / CALIBRATION)
    with state_beside(folder / THRESHOLDS) as state:
        table = find_thresholds(sources.checkpoint, calibration, allocation_options(recipe), state)
        table.write(folder / THRESHOLDS, overwrite=True)


def run_pack(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """The artifact, and its description."""
    from sparsepack.artifacts.inspect import describe

    assert recipe.pack is not None
    request = PackRequest(
        model=recipe.model,
        output=folder / ARTIFACT,
        thresholds=folder / THRESHOLDS if recipe.sparse else None,
        device=recipe.device,
        overwrite=True,
        recipe=provenance(recipe),
        **recipe.pack.model_dump(),
    )
    for note in pack(request).notes:
        say(f"pack: {note}")
    # Without its path: a work folder may be moved, and what needs this stage compares the bytes of its outputs.
    description = {name: value for name, value in describe(folder / ARTIFACT).items() if name != "path"}
    write_json(folder / DESCRIPTION, description)


def run_verify(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """The artifact against itself and against the model."""
    from sparsepack.artifacts.verify import verify_against

    report = verify_against(folder / ARTIFACT, sources.checkpoint)
    for problem in report.problems:
        say(f"verify: {problem}")
    write_json(folder / VERIFICATION, report.to_json())


def run_eval(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """Accuracy once per protocol: of the artifact, or where nothing is packed, of the model with its thresholds."""
    from sparsepack.eval.run import EvalRequest, evaluate

    assert recipe.eval is not None
    asked = recipe.eval
    subject = str(folder / ARTIFACT) if recipe.pack is not None else recipe.model
    evaluations = []
    for protocol in recipe.protocols():
        request = EvalRequest(
            subject=subject,
            thresholds=folder / THRESHOLDS if recipe.sparse and recipe.pack is None else None,
            protocol=protocol,
            against=recipe.model if asked.perplexity else None,
            task_path=Path(asked.task_path) if asked.task_path else None,
            device=recipe.device,
            dtype=recipe.dtype,
            **asked.model_dump(exclude={"protocols", "task_path"}),
        )
        evaluations.append(evaluate(request))
    allowed = _share_of_sparse_sites(recipe, sources)
    for evaluation in evaluations:
        for row in evaluation["perplexity"]:
            realised = row["realised_sparsity"]
            realised["of_sparse_sites"] = realised["overall"] / allowed if allowed else 0.0
    write_json(folder / EVALUATION, {"evaluations": evaluations})


def _share_of_sparse_sites(recipe: Recipe, sources: Sources) -> float:
    """The parameters of the sites that may be sparse, over those of all sites: the target is over the former."""
    if recipe.activation is None or not recipe.sparse:
        return 0.0
    checkpoint = sources.checkpoint
    weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
    return sum(weights[key] for key in sparse_sites(checkpoint, recipe.activation.include, recipe.activation.ignore))


def run_bench(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """Tokens a second, on the first evaluation text where there is one."""
    from sparsepack.artifacts.gguf.zigzag import read_zigzag
    from sparsepack.bench.decode import BenchSettings, bench_decode
    from sparsepack.models.windows import tokenise

    assert recipe.bench is not None
    asked = recipe.bench
    settings = BenchSettings(
        asked.prompt, asked.generate, asked.repetitions, asked.threads, asked.seed, device=recipe.device
    )
    packed = read_zigzag(folder / ARTIFACT, verify=False)  # unchanged since it was packed, or pack would have run
    ids, longest = None, max(asked.prompt, asked.generate)
    if sources.texts:
        bos = sources.checkpoint.tokenizer.bos_token_id
        ids = ([] if bos is None else [bos]) + tokenise(sources.checkpoint.tokenizer, sources.texts[0])
        if len(ids) < longest:
            say(f"bench: {sources.texts[0].name} is shorter than {longest} tokens; random tokens instead")
            ids = None
    result = bench_decode(packed, settings, ARTIFACT, ids)
    write_json(folder / BENCHMARK, {**result, "text": sources.texts[0].name if ids is not None else None})


def run_generate(recipe: Recipe, sources: Sources, folder: Path) -> None:
    """A text from the artifact: prompt dense, new tokens sparse."""
    from sparsepack.artifacts.gguf.zigzag import read_zigzag
    from sparsepack.bench.traffic import realised_sparsity
    from sparsepack.runtime.engine import Engine
    from sparsepack.runtime.generate import generate, open_tokenizer, prompt_tokens

    assert recipe.generate is not None
    asked = recipe.generate
    packed = read_zigzag(folder / ARTIFACT, verify=False)
    prompt = prompt_tokens(open_tokenizer(packed.tokenizer_json), asked.prompt, packed.architecture.bos)
    engine = Engine(packed, recipe.device, len(prompt) + asked.tokens)
    for line in (f"runtime: {engine.description}", *engine.notes):
        say(line)
    stream = generate(
        engine,
        packed.tokenizer_json,
        asked.prompt,
        asked.tokens,
        asked.temperature,
        asked.seed,
        top_k=asked.top_k,
        top_p=asked.top_p,
    )
    pieces, ended = [], ""
    while not ended:
        try:
            pieces.append(next(stream))
        except StopIteration as stop:
            ended = stop.value
    activity = engine.activity()
    result = {
        "prompt": asked.prompt,
        "text": "".join(pieces),
        "ended": ended,
        "realised_sparsity": realised_sparsity(packed, activity) if activity else None,
        "backend": engine.backend,
    }
    write_json(folder / GENERATED, result)
