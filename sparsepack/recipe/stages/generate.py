"""`generate`: a text from the artifact, the prompt dense, new tokens sparse."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from sparsepack.errors import UserError
from sparsepack.files.atomic import write_json
from sparsepack.placement.traffic import describe_hits
from sparsepack.progress import say
from sparsepack.recipe.section import Names, Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.engine import engine_options, engine_problems, needs_engine
from sparsepack.recipe.stages.pack import PACK, artifact_of
from sparsepack.runtime.options import EngineOptions, GenerateOptions
from sparsepack.tables import Part, Styled

RESULT = "generate.json"


class Generate(Section):
    """A text written by the artifact: the prompt is read with all weights, new tokens skip."""

    key: ClassVar[str] = "generate"
    options: ClassVar[type] = GenerateOptions
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)

    prompt: str = Field(description="The text to continue.")
    tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    stop: Names
    seed: int
    cached: float | None
    vram: str | None
    policy: str | None
    gate_copy: float | None


def _length(job: Job, section: Generate) -> int:
    """Tokens of the prompt and of what is made."""
    from sparsepack.runtime.generation.generate import open_tokenizer, prompt_tokens

    checkpoint = job.checkpoint
    tokenizer, config = open_tokenizer(checkpoint.tokenizer_json()), checkpoint.config
    prompt = prompt_tokens(tokenizer, section.prompt, checkpoint.tokenizer.bos_token_id, config.vocab_size)
    return len(prompt) + section.tokens


def _problems(recipe: Recipe, section: Generate) -> Iterator[str]:
    yield from needs_engine("generate", recipe)
    yield from engine_problems(recipe, section)


def _misfits(job: Job, section: Generate) -> Iterator[str]:
    from sparsepack.runtime.generation.generate import as_suggested, checked

    yield from job.too_long("generate, prompt and tokens together", _length(job, section))
    options, _ = as_suggested(GenerateOptions(**section.told(GenerateOptions)), job.checkpoint.generation)
    try:
        checked(options, lambda name: f"generate.{name}")
    except UserError as error:
        yield str(error)


def _run(job: Job, section: Generate) -> None:
    from sparsepack.loading import describe_runtime, load
    from sparsepack.runtime.generation.generate import as_suggested, told

    options = engine_options(job.recipe, section)
    model = load(artifact_of(job), context=_length(job, section), options=options, verify=False)
    say(*describe_runtime(model.engine))
    chosen, taken = as_suggested(GenerateOptions(**section.told(GenerateOptions)), model.packed.generation)
    if taken:
        say(told(taken, lambda name: f"generate.{name}"))
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
    write_json(job.folder / RESULT, result)


def _show(report: Mapping[str, Any]) -> Iterator[Part]:
    made = report["generate"]
    if made is not None:
        yield "\n", Styled(made["prompt"], "soft"), made["text"], "\n"
        if made["served"]:
            yield describe_hits(made["served"])


GENERATE = Stage(
    name="generate",
    key=Generate.key,
    type=Generate | None,
    needs=(PACK.name,),
    outputs=leaves(RESULT),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=lambda job, section: section.tokens,
    result=("generate", read_json(RESULT), None),
    show=_show,
)
