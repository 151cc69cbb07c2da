"""`bench`: tokens a second, on the first evaluation text where there is one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.files.atomic import write_json
from sparsepack.progress import say
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.engine import engine_options, engine_problems, needs_engine
from sparsepack.recipe.stages.eval import kernels, perplexity_texts
from sparsepack.recipe.stages.pack import PACK, artifact_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table

RESULT = "bench.json"


class Bench(Section):
    """Tokens a second of the artifact, on the first text of `eval.perplexity` where there is one; with `cached` once as
    without it, and once more with slots. With `vram`, which a card too small for the model needs, with slots alone."""

    key: ClassVar[str] = "bench"
    options: ClassVar[type] = BenchSettings
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)

    prompt: int
    generate: int
    repetitions: int
    threads: int | None
    seed: int
    backend: str | None
    batch: int
    cached: float | None
    vram: str | None
    policy: str | None
    gate_copy: float | None


def _problems(recipe: Recipe, section: Bench) -> Iterator[str]:
    yield from needs_engine("bench", recipe)
    yield from (problems := list(engine_problems(recipe, section)))
    if problems:
        return
    try:
        _asked_for(recipe, section)
    except UserError as error:
        yield f"bench: {error}"


def _asked_for(recipe: Recipe, section: Bench) -> BenchSettings:
    return BenchSettings(**section.told(BenchSettings), engine=engine_options(recipe, section))


def _misfits(job: Job, section: Bench) -> Iterator[str]:
    yield from job.too_long("bench.prompt", _prefilled(section))
    yield from job.too_long("bench.generate", section.generate)


def _prefilled(section: Bench) -> int:
    """Tokens of the prefill test, which there is none of for several sequences."""
    return section.prompt if section.batch == 1 else 0


def _settings(job: Job, section: Bench) -> dict[str, Any]:
    import torch

    from sparsepack.runtime.cpu.machine import cpu_info

    texts = [job.text([name]).sha256 for name in perplexity_texts(job.recipe)[:1]]
    machine = {"cpu": cpu_info(), "threads": torch.get_num_threads(), "runs": kernels()}
    return {**section.model_dump(mode="json"), "text_sha256": texts, "machine": machine}


def _run(job: Job, section: Bench) -> None:
    from sparsepack.bench.decode import bench_decode
    from sparsepack.formats.open import read_packed
    from sparsepack.models.tokenizer.windows import first_tokens

    settings = _asked_for(job.recipe, section)
    packed = read_packed(artifact_of(job), verify=False)  # unchanged since it was packed, or pack would have run
    ids, text = None, None
    for name in perplexity_texts(job.recipe)[:1]:
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
    write_json(job.folder / RESULT, {**result, "text": text, "with_places": with_slots})


def _tokens(job: Job, section: Bench) -> int:
    """The tokens of prefill, and of decoding, dense and sparse; with `cached` all of it again."""
    runs = section.repetitions if section.cached is None else 2 * section.repetitions
    return runs * (_prefilled(section) + 2 * section.generate * section.batch)


def _memory(job: Job, section: Bench) -> int:
    """The file and the engine's own order of it, and the array on which the memory's bandwidth is measured."""
    from sparsepack.bench.bandwidth import ARRAY_BYTES
    from sparsepack.recipe.plan import parameters

    return ARRAY_BYTES + parameters(job.checkpoint) * 9 // 8


def _show(report: Mapping[str, Any]) -> Iterator[Table]:
    from sparsepack.bench.run import speed_table

    if report["bench"]:
        yield speed_table(report["bench"])
        if report["bench"]["with_places"]:
            yield speed_table(report["bench"]["with_places"])


BENCH = Stage(
    name="bench",
    key=Bench.key,
    type=Bench | None,
    needs=(PACK.name,),
    outputs=leaves(RESULT),
    settings=_settings,
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    result=("bench", read_json(RESULT), None),
    show=_show,
)
