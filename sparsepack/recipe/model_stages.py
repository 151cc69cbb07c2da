"""The stages that study the model or make another one of it: each an operation, whose inputs lie in the work folder."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsepack.calibrate.distil import predict as predict_distilled
from sparsepack.calibrate.thresholds import ALLOCATIONS, AllocationOptions
from sparsepack.models.provenance import (
    DISTILLATION_FILE,
    PRUNING_FILE,
    ROTATION_FILE,
    basis_in_words,
    pruning_record,
)
from sparsepack.operation import function
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.sections import (
    ActivationSparsity,
    Calibrate,
    Distil,
    Prune,
    Rotate,
    wants_calibration,
)
from sparsepack.recipe.stage import Job, Stage, leaves, read_json, refusals

CALIBRATION, TABLE = "calibration", "thresholds.json"
MADE = ("rotated", "pruned", "distilled")
"""The names of models that stages make, of which each may be calibrated again."""
CALIBRATED = ("calibrate", *(f"calibrate_{made}" for made in MADE))


def calibration_of(job: Job) -> Path:
    """The folder of the model's calibration, as the recipe names it or as it was made since."""
    return job.folder / (f"{CALIBRATION}_{job.made}" if job.made else CALIBRATION)


def windows_and_held_out(job: Job) -> tuple[tuple[int, int], int]:
    """How many windows are calibrated on and how many are held out, and of how many tokens each; none without a
    calibration."""
    from sparsepack.calibrate.collection import samples_of
    from sparsepack.models.tokenizer.windows import drawn_and_held_out, window_length

    section = Calibrate.find_in(job.recipe)
    if section is None:
        return (0, 0), 0
    context = window_length(section.context, job.checkpoint.config.max_position_embeddings)
    samples = samples_of(job.checkpoint, section.samples, context, job.recipe.device)
    count = job.windows_of(section.text, context, samples and samples + section.held_out)
    return drawn_and_held_out(count, samples, section.held_out), context


def windows(job: Job) -> tuple[int, int]:
    """How many windows are calibrated on, and of how many tokens each."""
    (drawn, _), context = windows_and_held_out(job)
    return drawn, context


def _stage(section: type[Section], output: str, **rest: Any) -> Stage:
    """The stage of an operation, which makes something under a name in the work folder.

    inputs -- what its `run` takes beside the rest: the calibration; where the job has an output of its own, that, too
    """
    operation = section.operation
    inputs = rest.pop("inputs", lambda job, section: {"calibration": calibration_of(job)})

    def run(job: Job, section: Section) -> None:
        """A run that was killed within goes on where it stopped."""
        options = section.as_options(job.recipe)
        given = {"output": job.folder / output, **inputs(job, section)}
        function(operation.run)(model=job.checkpoint, options=options, overwrite=True, **given)

    def cost(job: Job, section: Section) -> Any:
        return operation.cost(job.checkpoint, section.as_options(job.recipe), windows(job))

    def predict(job: Job, section: Section) -> Any:
        assert operation.predict is not None
        return operation.predict(job.checkpoint, section.as_options(job.recipe))

    found = {"name": operation.name, "key": section.key, "needs": CALIBRATED, "outputs": leaves(output), "cost": cost}
    if operation.predict is not None:
        found |= {"makes": output, "predict": predict}
    return Stage(type=section | None, run=run, **{**found, **rest})


def _misfits_of_calibrate(job: Job, section: Calibrate) -> Iterator[str]:
    yield from job.too_long("calibrate.context", section.context)
    job.text(section.text, f"{Calibrate.key}.text")


def _problems_of_calibrate(recipe: Recipe, section: Calibrate) -> Iterator[str]:
    if section.context is not None and section.context <= section.sinks:
        yield f"calibrate.sinks: {section.sinks}; expected fewer than context, {section.context}"


def _calibration_files(folder: str) -> Any:
    return leaves(f"{folder}/calibration.json", f"{folder}/calibration.safetensors")


CALIBRATE = _stage(
    Calibrate,
    CALIBRATION,
    inputs=lambda job, section: {"text": job.text(section.text), "output": calibration_of(job)},
    needs=(),
    outputs=_calibration_files(CALIBRATION),
    settings=lambda job, section: {
        **section.model_dump(mode="json"),
        "text_sha256": job.text(section.text).sha256,
    },
    problems=_problems_of_calibrate,
    misfits=_misfits_of_calibrate,
)


def _again(made: str) -> Stage:
    """The stage that calibrates a model that another one has made, where somebody wants to know it."""
    return replace(
        CALIBRATE,
        name=f"calibrate_{made}",
        outputs=_calibration_files(f"{CALIBRATION}_{made}"),
        wanted=lambda recipe, section: wants_calibration(recipe, made),
    )


CALIBRATE_ROTATED, CALIBRATE_PRUNED, CALIBRATE_DISTILLED = map(_again, MADE)


def _problems_of_rotate(recipe: Recipe, section: Rotate) -> Iterator[str]:
    if Calibrate.find_in(recipe) is None:
        yield "rotate: it takes statistics and text from a calibration; add a calibrate section"


def _misfits_of_rotate(job: Job, section: Rotate) -> Iterator[str]:
    from sparsepack.calibrate.rotation import check_model

    return refusals("rotate", lambda: check_model(job.checkpoint, section.as_options(job.recipe)))


def _plan_of_rotate(job: Job, section: Rotate | None) -> dict[str, Any]:
    """What the rotated model will cost."""
    from sparsepack.calibrate.rotation import notes_of

    if section is None:
        return {"rotation": None}
    made = job.ahead_of(ROTATE).checkpoint
    return {"rotation": {"basis": section.basis, "notes": list(notes_of(job.checkpoint, made, section.basis))}}


def _show_rotated(report: Mapping[str, Any]) -> Iterator[str]:
    if (made := report["rotate"]) is not None:
        into = basis_in_words(made["options"]["basis"], made.get("boundaries", ()))
        difference = f"over {made['tokens']:,} tokens the logits differ by {made['error']:.1e} of their size"
        yield f"rotated: into {into}; {difference}"


ROTATE = _stage(
    Rotate,
    "rotated",
    problems=_problems_of_rotate,
    misfits=_misfits_of_rotate,
    plan=_plan_of_rotate,
    show_plan=lambda plan: [f"rotated: {note}" for note in (plan["rotation"] or {"notes": ()})["notes"]],
    result=("rotate", read_json(f"rotated/{ROTATION_FILE}"), None),
    show=_show_rotated,
)


def _problems_of_prune(recipe: Recipe, section: Prune) -> Iterator[str]:
    options = section.as_options(recipe)
    yield from refusals("prune", options.check)
    if Calibrate.find_in(recipe) is None and options.reads_text:
        what = "looks at what enters a matrix; add a calibrate section, or take magnitude"
        yield f"prune.method: {section.method} {what}"


def _misfits_of_prune(job: Job, section: Prune) -> Iterator[str]:
    from sparsepack.calibrate.pruning import site_patterns

    found: list[Any] = []
    yield from refusals("prune", lambda: found.append(site_patterns(job.checkpoint, section.as_options(job.recipe))))
    if found == [{}]:
        yield "prune.sites: they leave nothing to prune; leave one of them out"


def _plan_of_prune(job: Job, section: Prune | None) -> dict[str, Any]:
    """What stays at each site that is pruned."""
    from sparsepack.calibrate.pruning import site_patterns
    from sparsepack.models.sites import site_name

    patterns = site_patterns(job.checkpoint, section.as_options(job.recipe)) if section else {}
    return {"pruned": {site_name(*key): f"{pattern.keep} of {pattern.of}" for key, pattern in patterns.items()}}


def _show_pruned(report: Mapping[str, Any]) -> Iterator[str]:
    if (made := report["prune"]) is None:
        return
    rows = made["matrices"]
    counts = Counter(f"keep {row['keep']} of {row['of']}" for row in rows)
    patterns = ", ".join(f"{pattern} in {count} matrices" for pattern, count in counts.items())
    worst = max(rows, key=lambda row: row["error"])
    yield (
        f"pruned: {patterns}, by {made['options']['method']}{', permuted' if made['options']['permute'] else ''}; "
        f"relative error of their outputs {sum(row['error'] for row in rows) / len(rows):.3f} on average, "
        f"{worst['error']:.3f} at most ({worst['site']})"
    )


PRUNE = _stage(
    Prune,
    "pruned",
    inputs=lambda job, section: {
        "calibration": calibration_of(job) if section.as_options(job.recipe).reads_text else None
    },
    problems=_problems_of_prune,
    misfits=_misfits_of_prune,
    plan=_plan_of_prune,
    result=("prune", read_json(f"pruned/{PRUNING_FILE}"), None),
    show=_show_pruned,
)


def _trains_pruned(job: Job) -> bool:
    """Whether the model that is trained is a pruned one."""
    return Prune.find_in(job.recipe) is not None or pruning_record(job.checkpoint.path) is not None


def _problems_of_distil(recipe: Recipe, section: Distil) -> Iterator[str]:
    if Calibrate.find_in(recipe) is None:
        yield "distil: it trains on the text of a calibration; add a calibrate section"


def _misfits_of_distil(job: Job, section: Distil) -> Iterator[str]:
    from sparsepack.calibrate.distillation import check_model, check_windows, teacher_of

    def check() -> None:
        check_model(job.checkpoint)
        if Prune.find_in(job.recipe) is None:
            teacher_of(job.checkpoint)
        options = section.as_options(job.recipe).of_model(_trains_pruned(job))
        check_windows(*windows(job), options, "calibrate")

    return refusals("distil", check)


def _inputs_of_distil(job: Job, section: Distil) -> dict[str, Any]:
    """Where nothing is skipped, a model that the recipe has pruned is trained on the text of its teacher."""
    before = job.before if Prune.find_in(job.recipe) is not None else None
    calibration = calibration_of(job if before is None or section.sparsity else before)
    return {"calibration": calibration, "teacher": None if before is None else before.checkpoint}


def _show_distilled(report: Mapping[str, Any]) -> Iterator[str]:
    if (made := report["distil"]) is not None:
        before, after = made["before"], made["after"]
        prompts = f", of dense prompts to {after['prompt']:.4f}" if made["options"]["sparsity"] else ""
        yield (
            f"distilled: over {made['tokens']:,} tokens of the calibration the KL divergence went from "
            f"{before['sparse']:.4f} to {after['sparse']:.4f}{prompts}"
        )


DISTIL = _stage(
    Distil,
    "distilled",
    inputs=_inputs_of_distil,
    cost=lambda job, section: Distil.operation.cost(
        job.checkpoint, section.as_options(job.recipe), windows(job), _trains_pruned(job)
    ),
    predict=lambda job, section: predict_distilled(job.checkpoint, section.as_options(job.recipe), _trains_pruned(job)),
    problems=_problems_of_distil,
    misfits=_misfits_of_distil,
    result=("distil", read_json(f"distilled/{DISTILLATION_FILE}"), None),
    show=_show_distilled,
)


def _problems_of_thresholds(recipe: Recipe, section: ActivationSparsity) -> Iterator[str]:
    key = ActivationSparsity.key
    if section.sparsity and Calibrate.find_in(recipe) is None:
        yield f"{key}: thresholds are taken on calibration text; add a calibrate section, or set sparsity to 0"
    windows_given = section.windows != AllocationOptions.windows
    for name, problem in ALLOCATIONS[section.allocation].problems(section.upstream, windows_given):
        yield f"{key}.{name}: {problem}"
    if (options := section.as_options(recipe)).block:
        yield from refusals(key, options.check)


def _settings_of_thresholds(job: Job, section: ActivationSparsity) -> dict[str, Any]:
    block = section.as_options(job.recipe).block
    return {**section.model_dump(mode="json"), **({"block": block} if block else {})}


def _misfits_of_thresholds(job: Job, section: ActivationSparsity) -> Iterator[str]:
    from sparsepack.models.sites import chosen_sites

    chosen_sites(job.checkpoint.sites, section.include, section.ignore)
    yield from ()


def _plan_of_thresholds(job: Job, section: ActivationSparsity | None) -> dict[str, Any]:
    """What each pattern matches."""
    from sparsepack.models.sites import chosen_sites, site_name

    lists = {} if section is None else {"include": section.include, "ignore": section.ignore}
    return {
        "patterns": [
            {
                "list": which,
                "pattern": pattern,
                "sites": [site_name(*key) for key in chosen_sites(job.checkpoint.sites, [pattern], [])],
            }
            for which, patterns in lists.items()
            for pattern in patterns
        ]
    }


def _show_patterns(plan: Mapping[str, Any]) -> Iterator[str]:
    for row in plan["patterns"]:
        found = row["sites"]
        yield f"{row['list']} {row['pattern']}: {len(found)} sites, {found[0]} to {found[-1]}"


def _read_table(folder: Path) -> Any:
    """The table; its vectors stay in their file."""
    table = read_json(TABLE)(folder)
    for row in table["rows"]:
        row |= {name: row[name] is not None for name in ("channel_weights", "offset")}
    return table


THRESHOLDS = _stage(
    ActivationSparsity,
    TABLE,
    settings=_settings_of_thresholds,
    wanted=lambda recipe, section: section.sparsity > 0,
    problems=_problems_of_thresholds,
    misfits=_misfits_of_thresholds,
    plan=_plan_of_thresholds,
    show_plan=_show_patterns,
    result=("thresholds", _read_table, None),
)
