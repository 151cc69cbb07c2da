"""The stages that measure the artifact and run it, and the table of all stages, in the order in which they run.

A stage whose fingerprint and outputs are unchanged is skipped; a changed one runs again with everything that needs it.
Nothing heavy is imported at the top of these files: a mistake in a recipe is told without waiting for torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsepack.bench.options import BenchSettings
from sparsepack.bench.options import cost as cost_of_bench
from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest, require_lm_eval
from sparsepack.eval.results import accuracy_tables, pruning_table
from sparsepack.files.atomic import write_json
from sparsepack.formats.table import FORMATS, those_with
from sparsepack.operation import Cost
from sparsepack.option import default_of
from sparsepack.placement.traffic import describe_hits
from sparsepack.progress import say
from sparsepack.recipe.artifact_stages import PACK, VERIFY, artifact_of
from sparsepack.recipe.model_stages import (
    CALIBRATE,
    CALIBRATE_DISTILLED,
    CALIBRATE_PRUNED,
    CALIBRATE_ROTATED,
    DISTIL,
    PRUNE,
    ROTATE,
    TABLE,
    THRESHOLDS,
)
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.sections import (
    ActivationSparsity,
    Bench,
    Eval,
    Generate,
    Pack,
    bench_texts,
    evaluates_pruned,
    mlp_kind,
    protocols_of,
    skips_neurons,
    sparse,
)
from sparsepack.recipe.stage import Job, Stage, leaves, read_json, refusals
from sparsepack.runtime.backends import BACKENDS, backend_for, find_backend
from sparsepack.runtime.options import EngineOptions, GenerateOptions
from sparsepack.tables import Part, Styled, Table


def engine_options(recipe: Recipe, section: Section) -> EngineOptions:
    """What a section tells the engine: its other keys that `EngineOptions` have. Raises `UserError` as those do."""
    own = section.told(section.options)
    told = {name: value for name, value in section.told(EngineOptions).items() if name not in own}
    return EngineOptions(device=recipe.device, **told)


def _problems_of_engine(recipe: Recipe, section: Section) -> Iterator[str]:
    """What is wrong with what a section tells the engine."""
    try:
        options = engine_options(recipe, section)
    except UserError as error:
        yield f"{section.key}: {error}"
        return
    row, name = backend_for(recipe.device), options.divided_by
    if name and not mlp_kind(recipe).by_count:
        able = those_with("mlp.by_count")
        yield f"{section.key}.{name}: the artifact's MLPs are not stored by neurons; expected pack.format {able}"
    if name and not row.divides(name):
        able = " or ".join(each.devices[0] for each in BACKENDS.values() if each.devices and each.divides(name))
        yield f"{section.key}.{name}: the {row.name} backend does not divide neurons so; expected device {able}"
    if options.hold and not sparse(recipe):
        key = ActivationSparsity.key
        yield f"{section.key}.hold: nothing is skipped whose share could be held; expected {key}.sparsity above 0"


def _lacks_artifact(name: str, recipe: Recipe) -> Iterator[str]:
    """What is wrong where a stage runs the artifact and there is none to run."""
    section = Pack.find_in(recipe)
    if section is None or not FORMATS[section.format].runs:
        yield f"{name}: it runs an artifact; expected a pack section of format {those_with('runs')}"


def _problems_of_eval(recipe: Recipe, section: Eval) -> Iterator[str]:
    by_transformers, dense = section.runtime == EvalRequest.runtime, set(protocols_of(recipe)) == {"dense"}
    if not section.perplexity and not section.tasks:
        yield "eval: nothing to evaluate; give it perplexity texts or tasks, or leave it out"
    if not by_transformers:
        yield from _lacks_artifact("eval.backend", recipe)
        yield from refusals("eval.backend", lambda: find_backend(section.runtime).check_device(recipe.device))
    yield from (problems := list(_problems_of_engine(recipe, section)))
    name = None if problems else engine_options(recipe, section).divided_by
    if name and not skips_neurons(recipe):
        able = " or ".join(row.name for row in BACKENDS.values() if row.divides(name))
        yield f"eval.{name}: transformers gives neurons no slots; expected eval.backend {able}"
    elif name == "cached" and dense:
        yield f"eval.{name}: nothing is decoded that slots could serve; expected protocol decode or all"
    if section.hold and not problems:
        if by_transformers:
            able = " or ".join(row.name for row in BACKENDS.values() if row.scales_thresholds)
            yield f"eval.hold: transformers takes thresholds as they are; expected eval.backend {able}"
        elif dense:
            yield "eval.hold: nothing is skipped whose share could be held; expected protocol decode or all"
    if section.apply_chat_template and not section.tasks:
        yield "eval.apply_chat_template: it is for tasks, and there are none; add eval.tasks or leave it out"
    if section.task_path and not Path(section.task_path).is_dir():
        yield f"eval.task_path: {section.task_path} is no folder (relative paths start at the working directory)"


def _misfits_of_eval(job: Job, section: Eval) -> Iterator[str]:
    if section.tasks:
        yield from refusals("eval.tasks", require_lm_eval)
    if section.runtime != EvalRequest.runtime:
        import torch

        from sparsepack.runtime.decoder import load_backend_module

        load_backend_module(find_backend(section.runtime)).usable(torch.device(job.recipe.device))
    if section.perplexity:
        yield from job.too_long("eval.context", section.context)
    for name in section.perplexity:
        job.text([name], f"{Eval.key}.perplexity")


def _settings_of_eval(job: Job, section: Eval) -> dict[str, Any]:
    import importlib.metadata

    from sparsepack.files.hashing import sha256_file

    # Of the task folder; data that its files name elsewhere is not looked at.
    folder = [] if section.task_path is None else sorted(Path(section.task_path).rglob("*"))
    return {
        **section.model_dump(mode="json"),
        "protocols": protocols_of(job.recipe),
        "second_half": "decode" in protocols_of(job.recipe),
        "kernels": _kernels() if section.runtime == "cpu" else None,
        "texts_sha256": [job.text([name]).sha256 for name in section.perplexity],
        "task_files": {str(path): sha256_file(path) for path in folder if path.is_file()},
        "lm_eval": importlib.metadata.version("lm_eval") if section.tasks else None,
    }


def _kernels() -> str:
    """The instruction set of the CPU's kernels, "reference" without them: what one measures says little of another."""
    from sparsepack.runtime.cpu.machine import instruction_set

    try:
        return instruction_set()
    except UserError:
        return "reference"


def eval_request(job: Job, section: Eval, protocol: str) -> EvalRequest:
    """The section as what `evaluate` takes, of the model that was made, against the recipe's."""
    recipe, engine = job.recipe, engine_options(job.recipe, section)
    if protocol == "dense":
        # Without what dense passes have no use for. A card too small for the model needs its budget all the same.
        engine = replace(engine, cached=None, policy=None if engine.vram is None else engine.policy, hold=False)
    own = {**section.told(EvalRequest), "task_path": Path(section.task_path) if section.task_path else None}
    return EvalRequest(
        subject=job.model,
        protocol=protocol,
        second_half="decode" in protocols_of(recipe),  # in one table, figures are of the same tokens
        against=recipe.model if section.perplexity else None,
        device=recipe.device,
        # An engine computes in its own types; beside it the source model runs in what it would without a recipe.
        dtype=recipe.dtype if section.runtime == EvalRequest.runtime else EvalRequest.dtype,
        engine=engine,
        **own,
    )


def _run_eval(job: Job, section: Eval) -> None:
    from sparsepack.eval.run import evaluate

    recipe = job.recipe
    packed = Pack.find_in(recipe) is not None
    evaluations = []
    for protocol in protocols_of(recipe):
        request = eval_request(job, section, protocol)
        if packed:
            request = replace(request, subject=str(artifact_of(job)))
        elif sparse(recipe):
            request = replace(request, thresholds=job.folder / TABLE)
        evaluations.append(evaluate(request, lambda name: job.text([name])))
    for evaluation in evaluations:
        # Without the work folder's path, as in `verify.json`.
        subject = evaluation["subject"]
        subject["name"] = artifact_of(job).name if packed else job.checkpoint.name
        subject["thresholds"] = TABLE if subject["thresholds"] else None
    write_json(job.folder / "eval.json", {"evaluations": evaluations})


def _cost_of_protocol(job: Job, section: Eval) -> Cost:
    """What one protocol takes."""
    from sparsepack.eval.run import cost
    from sparsepack.models.tokenizer.windows import window_length

    context = window_length(section.context, job.checkpoint.config.max_position_embeddings)
    count = sum(job.windows_of((name,), context, section.windows) for name in section.perplexity)
    request = replace(eval_request(job, section, "dense"), dtype=job.recipe.dtype)
    return cost(job.checkpoint, request, count)


def _cost_of_eval(job: Job, section: Eval) -> Cost:
    each = _cost_of_protocol(job, section)
    return replace(each, tokens=(each.tokens or 0) * len(protocols_of(job.recipe)))


def _show_plan_of_eval(plan: Mapping[str, Any]) -> Iterator[str]:
    if plan["recipe"]["eval"] and plan["recipe"]["eval"]["tasks"]:
        yield "tokens of lm-eval tasks are not counted"


EVAL = Stage(
    name="eval",
    key=Eval.key,
    type=Eval | None,
    needs=(THRESHOLDS.name, PACK.name),
    outputs=leaves("eval.json"),
    settings=_settings_of_eval,
    run=_run_eval,
    problems=_problems_of_eval,
    misfits=_misfits_of_eval,
    cost=_cost_of_eval,
    show_plan=_show_plan_of_eval,
    result=("evaluations", lambda folder: read_json("eval.json")(folder)["evaluations"], []),
    show=lambda report: accuracy_tables(report["evaluations"]),
)


def _request_of_pruned(job: Job, section: Eval) -> EvalRequest:
    """The source model is computed in the type in which `eval` computes it."""
    names = ("tasks", "task_path", "trust_tasks", "limit", "num_fewshot", "apply_chat_template", "runtime")
    defaults = {name: default_of(EvalRequest, name) for name in names}
    return replace(eval_request(job, section, "dense"), **defaults)


def _settings_of_pruned(job: Job, section: Eval) -> dict[str, Any]:
    return {
        "dtype": _request_of_pruned(job, section).dtype,
        "context": section.context,
        "windows": section.windows,
        "batch": section.batch,
        "second_half": "decode" in protocols_of(job.recipe),
        "texts_sha256": [job.text([name]).sha256 for name in section.perplexity],
    }


def _run_eval_pruned(job: Job, section: Eval) -> None:
    from sparsepack.eval.run import evaluate

    evaluation = evaluate(_request_of_pruned(job, section), lambda name: job.text([name]))
    evaluation["subject"]["name"] = job.checkpoint.name  # without the work folder's path
    write_json(job.folder / "eval_pruned.json", evaluation)


def _show_pruned(report: Mapping[str, Any]) -> Iterator[Table]:
    if report["eval_pruned"]:
        yield pruning_table(report["evaluations"], report["eval_pruned"])


EVAL_PRUNED = Stage(
    name="eval_pruned",
    key=Eval.key,
    type=Eval | None,
    outputs=leaves("eval_pruned.json"),
    settings=_settings_of_pruned,
    run=_run_eval_pruned,
    wanted=evaluates_pruned,
    cost=_cost_of_protocol,
    result=("eval_pruned", read_json("eval_pruned.json"), None),
    show=_show_pruned,
)


def _bench_settings(recipe: Recipe, section: Bench) -> BenchSettings:
    return BenchSettings(**section.told(BenchSettings), engine=engine_options(recipe, section))


def _problems_of_bench(recipe: Recipe, section: Bench) -> Iterator[str]:
    yield from _lacks_artifact("bench", recipe)
    yield from (problems := list(_problems_of_engine(recipe, section)))
    if not problems:
        yield from refusals("bench", lambda: _bench_settings(recipe, section))


def _misfits_of_bench(job: Job, section: Bench) -> Iterator[str]:
    yield from job.too_long("bench.prompt", section.prompt if section.batch == 1 else 0)
    yield from job.too_long("bench.generate", section.generate)


def _settings_of_bench(job: Job, section: Bench) -> dict[str, Any]:
    import torch

    from sparsepack.runtime.cpu.machine import cpu_info

    texts = [job.text([name]).sha256 for name in bench_texts(job.recipe)]
    machine = {"cpu": cpu_info(), "threads": torch.get_num_threads(), "runs": _kernels()}
    return {**section.model_dump(mode="json"), "text_sha256": texts, "machine": machine}


def _run_bench(job: Job, section: Bench) -> None:
    from sparsepack.bench.decode import bench_decode
    from sparsepack.formats.open import read_packed
    from sparsepack.models.tokenizer.windows import first_tokens

    settings = _bench_settings(job.recipe, section)
    packed = read_packed(artifact_of(job), verify=False)  # unchanged since it was packed, or pack would have run
    ids, text = None, None
    for name in bench_texts(job.recipe):
        tokenizer, vocabulary = job.checkpoint.tokenizer, packed.architecture.vocabulary
        ids, text = first_tokens(tokenizer, job.text([name]), settings.tokens, vocabulary), name
        if len(ids) < settings.tokens:
            say(f"bench: {name} is shorter than {settings.tokens} tokens; random tokens instead")
            ids, text = None, None
    name = artifact_of(job).name
    if section.cached is None:
        result, with_slots = bench_decode(packed, settings, name, ids), None
    else:
        without = replace(settings, engine=replace(settings.engine, cached=None, policy=None))
        result, with_slots = (bench_decode(packed, each, name, ids) for each in (without, settings))
    write_json(job.folder / "bench.json", {**result, "text": text, "with_places": with_slots})


def _show_speed(report: Mapping[str, Any]) -> Iterator[Table]:
    from sparsepack.bench.run import speed_table

    found = report["bench"]
    yield from (speed_table(each) for each in (found, found and found["with_places"]) if each)


BENCH = Stage(
    name="bench",
    key=Bench.key,
    type=Bench | None,
    needs=(PACK.name,),
    outputs=leaves("bench.json"),
    settings=_settings_of_bench,
    run=_run_bench,
    problems=_problems_of_bench,
    misfits=_misfits_of_bench,
    cost=lambda job, section: cost_of_bench(job.checkpoint, _bench_settings(job.recipe, section)),
    result=("bench", read_json("bench.json"), None),
    show=_show_speed,
)


def _length(job: Job, section: Generate) -> int:
    """Tokens of the prompt and of what is made."""
    from sparsepack.runtime.generation.generate import open_tokenizer, prompt_tokens

    checkpoint = job.checkpoint
    tokenizer, config = open_tokenizer(checkpoint.tokenizer_json()), checkpoint.config
    prompt = prompt_tokens(tokenizer, section.prompt, checkpoint.tokenizer.bos_token_id, config.vocab_size)
    return len(prompt) + int(section.tokens)


def _problems_of_generate(recipe: Recipe, section: Generate) -> Iterator[str]:
    yield from _lacks_artifact("generate", recipe)
    yield from _problems_of_engine(recipe, section)


def _misfits_of_generate(job: Job, section: Generate) -> Iterator[str]:
    from sparsepack.runtime.generation.generate import apply_suggestions, check_generate_options

    yield from job.too_long("generate, prompt and tokens together", _length(job, section))
    options, _ = apply_suggestions(GenerateOptions(**section.told(GenerateOptions)), job.checkpoint.generation)
    try:
        check_generate_options(options, lambda name: f"generate.{name}")
    except UserError as error:
        yield str(error)


def _run_generate(job: Job, section: Generate) -> None:
    from sparsepack.loading import describe_runtime, load
    from sparsepack.runtime.generation.generate import apply_suggestions, describe_suggestions

    options = engine_options(job.recipe, section)
    model = load(artifact_of(job), context=_length(job, section), options=options, verify=False)
    say(describe_runtime(model.engine))
    chosen, taken = apply_suggestions(GenerateOptions(**section.told(GenerateOptions)), model.packed.generation)
    if taken:
        say(describe_suggestions(taken, lambda name: f"generate.{name}"))
    made = model.generate(section.prompt, chosen).result()
    hits = model.engine.hit_counts
    result = {
        "prompt": section.prompt,
        "text": made.text,
        "ended": made.reason,
        "realised_sparsity": made.skipped.overall if made.skipped else None,
        "backend": model.engine.backend,
        "served": hits.to_json() if hits else None,
    }
    write_json(job.folder / "generate.json", result)


def _show_text(report: Mapping[str, Any]) -> Iterator[Part]:
    if (made := report["generate"]) is not None:
        yield "\n", Styled(made["prompt"], "soft"), made["text"], "\n"
        if made["served"]:
            yield describe_hits(made["served"])


GENERATE = Stage(
    name="generate",
    key=Generate.key,
    type=Generate | None,
    needs=(PACK.name,),
    outputs=leaves("generate.json"),
    run=_run_generate,
    problems=_problems_of_generate,
    misfits=_misfits_of_generate,
    cost=lambda job, section: Cost(section.tokens),
    result=("generate", read_json("generate.json"), None),
    show=_show_text,
)

_MODEL = (CALIBRATE, ROTATE, CALIBRATE_ROTATED, PRUNE, CALIBRATE_PRUNED, DISTIL, CALIBRATE_DISTILLED)
STAGES = (*_MODEL, THRESHOLDS, PACK, VERIFY, EVAL, EVAL_PRUNED, BENCH, GENERATE)
