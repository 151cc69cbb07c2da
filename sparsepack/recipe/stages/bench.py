"""`bench`: tokens a second, on the first evaluation text where there is one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rich.markup import escape

from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.files.atomic import write_json
from sparsepack.models.skipped import shown
from sparsepack.progress import say
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.eval import kernels, perplexity_texts
from sparsepack.recipe.stages.pack import PACK, artifact_of, needs_engine, places_problems
from sparsepack.runtime.hybrid.options import PlacesOptions
from sparsepack.runtime.hybrid.served import served_in_words

RESULT = "bench.json"


class Bench(Section):
    """Tokens a second of the artifact, on the first text of `eval.perplexity` where there is one; with `cached` once
    as without it, and once more with places."""

    key: ClassVar[str] = "bench"
    options: ClassVar[type] = BenchSettings
    also: ClassVar[tuple[type, ...]] = (PlacesOptions,)

    prompt: int
    generate: int
    repetitions: int
    threads: int | None
    seed: int
    backend: str | None
    batch: int
    cached: float | None
    policy: str | None


def _problems(recipe: Recipe, asked: Bench) -> Iterator[str]:
    yield from needs_engine("bench", recipe)
    yield from (problems := list(places_problems("bench", recipe, asked.cached, asked.policy)))
    if problems:
        return
    try:
        _asked_for(recipe, asked)
    except UserError as error:
        yield f"bench: {error}"


def _asked_for(recipe: Recipe, asked: Bench) -> BenchSettings:
    given = asked.model_dump(exclude={"cached", "policy"})
    return BenchSettings(**given, device=recipe.device, places=PlacesOptions(asked.cached, asked.policy))


def _misfits(job: Job, asked: Bench) -> Iterator[str]:
    yield from job.too_long("bench.prompt", _prefilled(asked))
    yield from job.too_long("bench.generate", asked.generate)


def _prefilled(asked: Bench) -> int:
    """Tokens of the prefill test, which there is none of for several sequences."""
    return asked.prompt if asked.batch == 1 else 0


def _settings(job: Job, asked: Bench) -> dict[str, Any]:
    import torch

    from sparsepack.runtime.cpu.machine import cpu_info

    texts = [job.text([name]).sha256 for name in perplexity_texts(job.recipe)[:1]]
    machine = {"cpu": cpu_info(), "threads": torch.get_num_threads(), "runs": kernels()}
    return {**asked.model_dump(mode="json"), "text_sha256": texts, "machine": machine}


def _run(job: Job, asked: Bench) -> None:
    from sparsepack.artifacts.open import read_packed
    from sparsepack.bench.decode import bench_decode
    from sparsepack.models.windows import tokenise

    settings = _asked_for(job.recipe, asked)
    packed = read_packed(artifact_of(job), verify=False)  # unchanged since it was packed, or pack would have run
    ids, text = None, None
    for name in perplexity_texts(job.recipe)[:1]:
        tokenizer = job.checkpoint.tokenizer
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids, text = bos + tokenise(tokenizer, job.text([name]), settings.tokens).tolist(), name
        if len(ids) < settings.tokens:
            say(f"bench: {name} is shorter than {settings.tokens} tokens; random tokens instead")
            ids, text = None, None
    name = artifact_of(job).name
    result = bench_decode(packed, replace(settings, places=None), name, ids)
    with_places = bench_decode(packed, settings, name, ids) if asked.cached is not None else None
    write_json(job.folder / RESULT, {**result, "text": text, "with_places": with_places})


def _tokens(job: Job, asked: Bench) -> int:
    """Of prefill, and of decoding, dense and sparse; all of it again with places."""
    runs = asked.repetitions if asked.cached is None else 2 * asked.repetitions
    return runs * (_prefilled(asked) + 2 * asked.generate * asked.batch)


def _memory(job: Job, asked: Bench) -> int:
    """The file and the engine's own order of it, and the array on which the memory's bandwidth is measured."""
    from sparsepack.bench.machine import ARRAY_BYTES
    from sparsepack.recipe.estimates import parameters

    return ARRAY_BYTES + parameters(job.checkpoint) * 9 // 8


def _skipped(row: Mapping[str, Any]) -> str:
    return shown(row["realised_sparsity"], row["realised_sparsity_of_sparse_sites"])


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    for found in (report["bench"], report["bench"] and report["bench"].get("with_places")):
        if found is not None:
            yield from _rows(found)


def _rows(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["tests"]:
        what = "prefill" if row["n_prompt"] else "decode"
        skipped = f", {_skipped(row)} skipped" if row["mode"] == "sparse" else ""
        served = f"; {served_in_words(row['served'])}" if row.get("served") else ""
        yield (
            f"{what} of {row['n_prompt'] or row['n_gen']} tokens, {row['mode']}: "
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f} tokens/s{skipped}{served}"
        )
    yield f"  ({escape(found['runtime'])})"


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
