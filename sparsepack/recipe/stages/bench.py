"""`bench`: tokens a second, on the first evaluation text where there is one."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rich.markup import escape

from sparsepack.bench.options import BenchSettings
from sparsepack.files.atomic import write_json
from sparsepack.progress import say
from sparsepack.recipe.section import Count, Natural, Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.eval import perplexity_texts
from sparsepack.recipe.stages.pack import PACK, artifact_of, needs_engine

RESULT = "bench.json"


class Bench(Section):
    """What `BenchSettings` takes; prompt and generate are its n_prompt and n_gen."""

    key: ClassVar[str] = "bench"

    prompt: Natural = BenchSettings.n_prompt
    generate: Natural = BenchSettings.n_gen
    repetitions: Count = BenchSettings.repetitions
    threads: Count | None = BenchSettings.threads
    seed: Natural = BenchSettings.seed


def _problems(recipe: Recipe, asked: Bench) -> Iterator[str]:
    yield from needs_engine("bench", recipe)
    if not asked.prompt and not asked.generate:
        yield "bench: prompt and generate are both 0; give one of them tokens"


def _misfits(job: Job, asked: Bench) -> Iterator[str]:
    yield from job.too_long("bench.prompt", asked.prompt)
    yield from job.too_long("bench.generate", asked.generate)


def _settings(job: Job, asked: Bench) -> dict[str, Any]:
    import torch

    from sparsepack.runtime.cpu.machine import cpu_info

    texts = [job.text([name]).sha256 for name in perplexity_texts(job.recipe)[:1]]
    machine = {"cpu": cpu_info(), "threads": torch.get_num_threads(), "runs": _what_runs()}
    return {**asked.model_dump(mode="json"), "text_sha256": texts, "machine": machine}


def _what_runs() -> str:
    """The instruction set of the CPU's kernels, "reference" without them: a bench of one says nothing of the other."""
    from sparsepack.errors import UserError
    from sparsepack.runtime.cpu.dispatch import instruction_set

    try:
        return instruction_set()
    except UserError:
        return "reference"


def _run(job: Job, asked: Bench) -> None:
    from sparsepack.artifacts.open import read_packed
    from sparsepack.bench.decode import bench_decode
    from sparsepack.models.windows import tokenise

    device = job.recipe.device
    settings = BenchSettings(asked.prompt, asked.generate, asked.repetitions, asked.threads, asked.seed, device=device)
    packed = read_packed(artifact_of(job), verify=False)  # unchanged since it was packed, or pack would have run
    ids, text = None, None
    for name in perplexity_texts(job.recipe)[:1]:
        tokenizer = job.checkpoint.tokenizer
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids, text = bos + tokenise(tokenizer, job.text([name]), settings.tokens).tolist(), name
        if len(ids) < settings.tokens:
            say(f"bench: {name} is shorter than {settings.tokens} tokens; random tokens instead")
            ids, text = None, None
    write_json(job.folder / RESULT, {**bench_decode(packed, settings, artifact_of(job).name, ids), "text": text})


def _memory(job: Job, asked: Bench) -> int:
    """The file and the engine's own order of it, and the array on which the memory's bandwidth is measured."""
    from sparsepack.bench.machine import ARRAY_BYTES
    from sparsepack.recipe.estimates import parameters

    return ARRAY_BYTES + parameters(job.checkpoint) * 9 // 8


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    if report["bench"] is None:
        return
    for row in report["bench"]["tests"]:
        what = "prefill" if row["n_prompt"] else "decode"
        skipped = f", {100 * row['realised_sparsity']:.1f} % skipped" if row["mode"] == "sparse" else ""
        yield (
            f"{what} of {row['n_prompt'] or row['n_gen']} tokens, {row['mode']}: "
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f} tokens/s{skipped}"
        )
    yield f"  ({escape(report['bench']['runtime'])})"


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
    tokens=lambda job, asked: asked.repetitions * (asked.prompt + 2 * asked.generate),
    memory=_memory,
    result=("bench", read_json(RESULT), None),
    show=_show,
)
