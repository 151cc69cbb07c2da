"""`eval`: accuracy once per protocol, of the artifact, or where nothing is packed, of the model with its thresholds."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from sparsepack.errors import RecipeError, UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.results import accuracy_tables
from sparsepack.files.atomic import write_json
from sparsepack.recipe.section import PATH, Limit, Names, Recipe, Section, limit, listed
from sparsepack.recipe.stage import Job, Stage, Value, Verdict, judged, leaves, read_json
from sparsepack.recipe.stages.engine import engine_options, engine_problems, needs_engine
from sparsepack.recipe.stages.pack import PACK, Pack, artifact_of, mlp_kind, sparse_attention
from sparsepack.recipe.stages.thresholds import TABLE, THRESHOLDS, ActivationSparsity, sparse
from sparsepack.runtime.backends import BACKENDS, backend_named
from sparsepack.runtime.options import EngineOptions

Protocol = Literal["decode", "all", "dense"]


class Eval(Section):
    """Accuracy, once per protocol, of the artifact; without `pack`, of the model with its thresholds. It is compared
    with the recipe's `model`, also where that was pruned; then the pruned model is measured by itself, too."""

    key: ClassVar[str] = "eval"
    options: ClassVar[type] = EvalRequest
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)

    perplexity: Annotated[Names, PATH]
    protocols: Annotated[tuple[Protocol, ...], BeforeValidator(listed)] = Field(
        (),
        description="Which tokens are sparse; each protocol named gives rows. None: decode where it skips weights or "
        "tokens, else dense. Beside decode, the others score what it scores too, the second half of each window.",
    )
    context: int | None
    windows: int | None
    tasks: Names
    task_path: Annotated[str | None, PATH]
    trust_tasks: bool
    runtime: str = Field(alias="backend")
    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    batch: int | None
    cached: float | None
    vram: str | None
    policy: str | None
    gate_copy: float | None


def perplexity_texts(recipe: Recipe) -> tuple[str, ...]:
    """The texts whose perplexity is measured; none without an eval section."""
    section = Eval.find_in(recipe)
    return section.perplexity if section is not None else ()


def protocols_of(recipe: Recipe) -> tuple[str, ...]:
    """The protocols of the evaluation, each once, in the order asked for."""
    section = Eval.find_in(recipe)
    some = sparse(recipe) or sparse_attention(recipe) or skips_neurons(recipe)
    return tuple(dict.fromkeys(section.protocols if section else ())) or ("decode" if some else "dense",)


def skips_neurons(recipe: Recipe) -> bool:
    """Whether decoded tokens leave out inactive neurons, which transformers computes like all others."""
    section = Eval.find_in(recipe)
    return bool(mlp_kind(recipe).exact) and section is not None and section.runtime != EvalRequest.runtime


def second_half(recipe: Recipe) -> bool:
    """Whether every protocol scores the tokens that decode does: in one table, figures are of the same tokens."""
    return "decode" in protocols_of(recipe)


_OF_A_ROW = {
    "perplexity": "How badly the text is predicted.",
    "perplexity_ratio": "Over the source model's perplexity of the same tokens.",
    "kl_divergence": "From the source model's predictions, in nats a token.",
    "top_token_agreement": "Share of tokens whose likeliest successor is the source model's.",
    "bits_per_byte": "How badly the text is predicted, whatever the tokenizer.",
}
_SPARSITIES = {
    "realised_sparsity": "Share of all block weights that a decoded token skips; rows of `dense` do not count.",
    "realised_sparsity_of_sparse_sites": "The same of the weights of the sites that may be sparse, as the target is.",
}
_KEYS = {"realised_sparsity": "overall", "realised_sparsity_of_sparse_sites": "of_sparse_sites"}


def unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    section = Eval.find_in(recipe)
    for name in (*_OF_A_ROW, *_SPARSITIES):
        if getattr(gates, name) is not None and not perplexity_texts(recipe):
            yield f"gates.{name}: it is not measured; add texts as eval.perplexity"
    for name in _SPARSITIES:
        if getattr(gates, name) is None:
            continue
        if mlp_kind(recipe).exact and not sparse(recipe) and not skips_neurons(recipe):
            yield f"gates.{name}: transformers computes inactive neurons, too; expected eval.backend cpu"
        elif not (sparse(recipe) or mlp_kind(recipe).exact) or set(protocols_of(recipe)) == {"dense"}:
            above = f"{ActivationSparsity.key}.sparsity above 0"
            yield f"gates.{name}: nothing runs sparse; expected {above}, and decode or all"
    for task in gates.tasks:
        if not any(fnmatch.fnmatch(task, pattern) for pattern in (section.tasks if section else ())):
            yield f"gates.tasks.{task}: it is not measured; add it to eval.tasks"


def judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    evaluations = report["evaluations"]
    rows = [
        (f"{row['text']}, {row['protocol']}", row) for evaluation in evaluations for row in evaluation["perplexity"]
    ]
    for name in _OF_A_ROW:
        values = (Value(where, _number(row[name])) for where, row in rows)
        yield from judged(name, getattr(gates, name), values)
    # In dense rows nothing is skipped by definition.
    sparse_rows = [(where, row["realised_sparsity"]) for where, row in rows if row["protocol"] != "dense"]
    for name, key in _KEYS.items():
        yield from judged(name, getattr(gates, name), (Value(where, realised[key]) for where, realised in sparse_rows))
    for task, metrics in gates.tasks.items():
        for metric, bounds in metrics.items():
            yield from judged(f"tasks.{task}.{metric}", bounds, _task_values(task, metric, evaluations))


def _number(value: Any) -> float | None:
    found: float | None = value["value"] if isinstance(value, Mapping) else value
    return found


def _task_values(task: str, metric: str, evaluations: list[Mapping[str, Any]]) -> Iterator[Value]:
    for evaluation in evaluations:
        found = evaluation["tasks"]
        measured = {**found["groups"], **found["tasks"]}
        if task not in measured:
            raise RecipeError(f"gates.tasks.{task}: not measured; there are {', '.join(measured)}")
        metrics = measured[task]["metrics"]
        if metric not in metrics:
            raise RecipeError(f"gates.tasks.{task}.{metric}: not measured; there are {', '.join(metrics)}")
        yield Value(f"{task}, {evaluation['protocol']}", metrics[metric]["value"])


GATES: dict[str, tuple[Any, Any]] = {
    **{name: limit(meaning) for name, meaning in {**_OF_A_ROW, **_SPARSITIES}.items()},
    "tasks": (
        Annotated[dict[str, dict[str, Limit]], Field(description="Of lm-eval tasks: task, metric, limits.")],
        {},
    ),
}
"""The limits apply to every perplexity row (text and protocol), the worst of which is shown."""


RESULT = "eval.json"


def _problems(recipe: Recipe, section: Eval) -> Iterator[str]:
    if not section.perplexity and not section.tasks:
        yield "eval: nothing to evaluate; give it perplexity texts or tasks, or leave it out"
    if section.runtime != EvalRequest.runtime:
        yield from needs_engine("eval.backend", recipe)
        try:
            backend_named(section.runtime).check_device(recipe.device)
        except UserError as error:
            yield f"eval.backend: {error}"
    yield from (problems := list(engine_problems(recipe, section)))
    name = None if problems else engine_options(recipe, section).divided_by
    if name and not skips_neurons(recipe):
        able = " or ".join(row.name for row in BACKENDS.values() if row.divides(name))
        yield f"eval.{name}: transformers gives neurons no slots; expected eval.backend {able}"
    elif name == "cached" and set(protocols_of(recipe)) == {"dense"}:
        yield f"eval.{name}: nothing is decoded that slots could serve; expected protocol decode or all"
    if section.told(EngineOptions)["hold"] and not problems:
        if section.runtime == EvalRequest.runtime:
            able = " or ".join(row.name for row in BACKENDS.values() if row.holds)
            yield f"eval.hold: transformers takes thresholds as they are; expected eval.backend {able}"
        elif set(protocols_of(recipe)) == {"dense"}:
            yield "eval.hold: nothing is skipped whose share could be held; expected protocol decode or all"
    if section.apply_chat_template and not section.tasks:
        yield "eval.apply_chat_template: it is for tasks, and there are none; add eval.tasks or leave it out"
    if section.task_path and not Path(section.task_path).is_dir():
        yield f"eval.task_path: {section.task_path} is no folder (relative paths start at the working directory)"


def _misfits(job: Job, section: Eval) -> Iterator[str]:
    if section.runtime != EvalRequest.runtime:
        import torch

        from sparsepack.runtime.backend_module import opened

        opened(backend_named(section.runtime)).usable(torch.device(job.recipe.device))
    if section.perplexity:
        yield from job.too_long("eval.context", section.context)
    for name in section.perplexity:
        job.text([name], f"{Eval.key}.perplexity")


def _settings(job: Job, section: Eval) -> dict[str, Any]:
    import importlib.metadata

    return {
        **section.model_dump(mode="json"),
        "protocols": protocols_of(job.recipe),
        "second_half": second_half(job.recipe),
        "kernels": kernels() if section.runtime == "cpu" else None,
        "texts_sha256": [job.text([name]).sha256 for name in section.perplexity],
        "task_files": _hashes(section.task_path),
        "lm_eval": importlib.metadata.version("lm_eval") if section.tasks else None,
    }


def kernels() -> str:
    """The instruction set of the CPU's kernels, "reference" without them: what one measures says little of another."""
    from sparsepack.runtime.cpu.machine import instruction_set

    try:
        return instruction_set()
    except UserError:
        return "reference"


def _hashes(task_path: str | None) -> dict[str, str]:
    """The hashes of the files in the task folder; data that they name elsewhere is not looked at."""
    from sparsepack.files.hashing import sha256_file

    if task_path is None:
        return {}
    return {str(path): sha256_file(path) for path in sorted(Path(task_path).rglob("*")) if path.is_file()}


def request_of(job: Job, section: Eval, protocol: str) -> EvalRequest:
    """The section as what `evaluate` takes, of the model that was made, against the recipe's."""
    recipe = job.recipe
    own, engine = section.told(EvalRequest), engine_options(recipe, section)
    own["task_path"] = Path(section.task_path) if section.task_path else None
    return EvalRequest(
        subject=job.model,
        protocol=protocol,
        second_half=second_half(recipe),
        against=recipe.model if section.perplexity else None,
        device=recipe.device,
        # An engine computes in its own types; beside it the source model runs in what it would without a recipe.
        dtype=recipe.dtype if section.runtime == EvalRequest.runtime else EvalRequest.dtype,
        engine=_dense(engine) if protocol == "dense" else engine,
        **own,
    )


def _dense(engine: EngineOptions) -> EngineOptions:
    """Without what dense passes have no use for. A card too small for the model needs its budget all the same."""
    return replace(engine, cached=None, policy=None if engine.vram is None else engine.policy, hold=False)


def _run(job: Job, section: Eval) -> None:
    from sparsepack.eval.run import evaluate

    recipe = job.recipe
    packed = Pack.find_in(recipe) is not None
    evaluations = []
    for protocol in protocols_of(recipe):
        request = request_of(job, section, protocol)
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
    write_json(job.folder / RESULT, {"evaluations": evaluations})


def _context(job: Job, section: Eval) -> int:
    from sparsepack.models.tokenizer.windows import window_length

    return window_length(section.context, job.checkpoint.config.max_position_embeddings)


def tokens_of_one(job: Job, section: Eval) -> int:
    """The tokens of one protocol, ours and of the source model; those of lm-eval tasks are not known beforehand."""
    from sparsepack.recipe.plan import windows_in

    context = _context(job, section)
    windows = sum(windows_in(job, (name,), context, section.windows) for name in section.perplexity)
    return 2 * windows * context


def memory(job: Job, section: Eval) -> int:
    from sparsepack.eval.perplexity import POSITIONS, WORDS
    from sparsepack.eval.scorer import HIDDEN_BYTES
    from sparsepack.recipe.plan import LIVE, activation_bytes, block_parameters, dtype_bytes, parameters

    checkpoint, context, size = job.checkpoint, _context(job, section), dtype_bytes(job)
    config, whole = checkpoint.config, parameters(job.checkpoint) * size
    batch = section.batch or 1
    activations = activation_bytes(checkpoint, batch * context)
    logits = POSITIONS * WORDS * 4 * LIVE
    if not section.perplexity or job.recipe.device != "cpu":
        return int((2 if section.perplexity else 1) * whole + logits + activations)
    window = context * int(config.hidden_size) * size
    waiting = 2 * max(batch * window, min(HIDDEN_BYTES, (section.windows or HIDDEN_BYTES) * window))
    # The artifact's output matrix is decoded to float32, the source model's stays as it is stored.
    heads = int(config.vocab_size) * int(config.hidden_size) * (4 + checkpoint.dtype.itemsize)
    streamed = waiting + max(block_parameters(checkpoint) * size + activations, heads + logits)
    return int(max(streamed, whole if section.tasks else 0))


def _show_plan(plan: Mapping[str, Any]) -> Iterator[str]:
    if plan["recipe"]["eval"] and plan["recipe"]["eval"]["tasks"]:
        yield "tokens of lm-eval tasks are not counted"


EVAL = Stage(
    name="eval",
    key=Eval.key,
    type=Eval | None,
    needs=(THRESHOLDS.name, PACK.name),
    outputs=leaves(RESULT),
    settings=_settings,
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=lambda job, section: tokens_of_one(job, section) * len(protocols_of(job.recipe)),
    memory=memory,
    show_plan=_show_plan,
    result=("evaluations", lambda folder: read_json(RESULT)(folder)["evaluations"], []),
    show=lambda report: accuracy_tables(report["evaluations"]),
    gates=GATES,
    unmeasured=unmeasured,
    judge=judge,
)
