"""The section `eval` of a recipe, and what follows from it for the stages that measure."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from sparsepack.eval.options import EvalRequest
from sparsepack.recipe.section import PATH, Names, Recipe, Section, listed
from sparsepack.recipe.stages.pack import mlp_kind, sparse_attention
from sparsepack.recipe.stages.thresholds import sparse
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
    asked = Eval.asked_in(recipe)
    return asked.perplexity if asked is not None else ()


def protocols_of(recipe: Recipe) -> tuple[str, ...]:
    """The protocols of the evaluation, each once, in the order asked for."""
    asked = Eval.asked_in(recipe)
    some = sparse(recipe) or sparse_attention(recipe) or skips_neurons(recipe)
    return tuple(dict.fromkeys(asked.protocols if asked else ())) or ("decode" if some else "dense",)


def skips_neurons(recipe: Recipe) -> bool:
    """Whether decoded tokens leave out inactive neurons, which transformers computes like all others."""
    asked = Eval.asked_in(recipe)
    return bool(mlp_kind(recipe).exact) and asked is not None and asked.runtime != EvalRequest.runtime


def second_half(recipe: Recipe) -> bool:
    """Whether every protocol scores the tokens that decode does: in one table, figures are of the same tokens."""
    return "decode" in protocols_of(recipe)
