"""The sections of a recipe, one for each operation, and what follows from several of them together.

Nothing heavy is imported here: a mistake in a recipe is told without waiting for torch.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from sparsepack.bench.options import BENCH
from sparsepack.calibrate.collect import CALIBRATE
from sparsepack.calibrate.distil import DISTIL
from sparsepack.calibrate.prune import PRUNE, PruneOptions, SitePattern
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.rotate import ROTATE
from sparsepack.calibrate.thresholds import THRESHOLDS, AllocationOptions, AttentionOptions
from sparsepack.eval.options import EVAL, EvalRequest
from sparsepack.formats.kinds import DENSE, MlpKind
from sparsepack.formats.table import FORMATS
from sparsepack.operation import Operation
from sparsepack.packing import PACK
from sparsepack.recipe.section import PATH, Names, Recipe, Section, Text, listed
from sparsepack.runtime.options import EngineOptions, GenerateOptions


class Calibrate(Section):
    """Every statistic that thresholds, heavy channels and a basis are taken from, over a text, which is also what
    pruning and distilling look at. Where a recipe rotates, prunes or distils, and then skips or reads few tokens, the
    model that was made is calibrated again: both are about its own activations."""

    operation: ClassVar[Operation] = CALIBRATE

    text: Annotated[Names, PATH] = Field(
        min_length=1, description="What to run: a file, a data set of the hub or shipped:train; several are one text."
    )


class Rotate(Section):
    """The same model in a basis in which later steps lose less, or in several, before anything else is done with it
    ([how](rotation.md)). They take the rotated model, which lies as `rotated` in the work folder."""

    operation: ClassVar[Operation] = ROTATE


class OtherPattern(Section):
    """What stays at some of the sites."""

    options: ClassVar[type] = PruneOptions

    site: str = Field(min_length=1, description="A site, or a pattern of names.")
    keep: int
    of: int


class Prune(Section):
    """Weights that are set to zero before anything else is done with the model ([how](pruning.md)). Later steps
    take the pruned model, which lies as `pruned` in the work folder."""

    operation: ClassVar[Operation] = PRUNE

    sites: tuple[OtherPattern, ...]

    def as_options(self, recipe: Recipe) -> PruneOptions:
        sites = tuple(SitePattern(other.site, other.keep, other.of) for other in self.sites)
        options: PruneOptions = super().as_options(recipe)
        return replace(options, sites=sites)


class Distil(Section):
    """The model with weights trained so that skipping changes its output least, after it is rotated ([how](distil.md)).
    A model that is pruned is trained after that: what is left of it learns from the model from before. Later steps take
    the distilled model, which lies as `distilled` in the work folder."""

    operation: ClassVar[Operation] = DISTIL


class ActivationSparsity(Section):
    """How much a decoded token skips, and how that is decided. Sites match patterns: `blk.3.mlp_mid`, `blk.*.attn_in`,
    `re:REGEX`."""

    key: ClassVar[str] = "activation_sparsity"
    operation: ClassVar[Operation] = THRESHOLDS
    without: ClassVar[tuple[str, ...]] = ("format",)

    def as_options(self, recipe: Recipe) -> AllocationOptions:
        """For the levels of planes, where the recipe's format has some."""
        pack = Pack.find_in(recipe)
        format = FORMATS[pack.format] if pack else None
        block = format.matrices.block if format and format.levels else ""
        told = self.told(AllocationOptions)
        return AllocationOptions(**told, device=recipe.device, dtype=recipe.dtype, block=block)


class Pack(Section):
    """The artifact. Sparse attention takes its channels from the calibration, and weights are fitted to inputs on its
    text; of a rotated, pruned or distilled model it is made again."""

    operation: ClassVar[Operation] = PACK
    also: ClassVar[tuple[type, ...]] = (RefitOptions, AttentionOptions)
    without: ClassVar[tuple[str, ...]] = ("bits", "kl", "loss")

    tokens: Text
    dense_layers: Text

    def refit_options(self, recipe: Recipe) -> RefitOptions:
        """How weights come to be what is stored."""
        return RefitOptions(**self.told(RefitOptions), device=recipe.device, dtype=recipe.dtype)


_OF_COMMANDS = ("context", "dense", "offload")
"""Options of the engine that are for people who read what it makes."""
Protocol = Literal["decode", "all", "dense"]


class Eval(Section):
    """Accuracy, once per protocol, of the artifact; without `pack`, of the model with its thresholds. It is compared
    with the recipe's `model`, also where that was pruned; then the pruned model is measured by itself, too."""

    operation: ClassVar[Operation] = EVAL
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)
    without: ClassVar[tuple[str, ...]] = ("backend", "threads", *_OF_COMMANDS[1:])

    perplexity: Annotated[Names, PATH]
    protocols: Annotated[tuple[Protocol, ...], BeforeValidator(listed)] = Field(
        (),
        description="Which tokens are sparse; each protocol named gives rows. None: decode where it skips weights or "
        "tokens, else dense. Beside decode, the others score what it scores too, the second half of each window.",
    )
    task_path: Annotated[str | None, PATH]
    runtime: str = Field(alias="backend")


class Bench(Section):
    """Tokens a second of the artifact, on the first text of `eval.perplexity`, else of `calibrate`; with `cached` once
    as without it, and once more with slots. With `vram`, which a card too small for the model needs, with slots
    alone."""

    operation: ClassVar[Operation] = BENCH
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)
    without: ClassVar[tuple[str, ...]] = _OF_COMMANDS


class Generate(Section):
    """A text written by the artifact: the prompt is read with all weights, new tokens skip."""

    key: ClassVar[str] = "generate"
    options: ClassVar[type] = GenerateOptions
    also: ClassVar[tuple[type, ...]] = (EngineOptions,)
    every: ClassVar[bool] = True
    without: ClassVar[tuple[str, ...]] = ("backend", "threads", *_OF_COMMANDS)

    prompt: str = Field(description="The text to continue.")


def sparse(recipe: Recipe) -> bool:
    """Whether decoding will skip anything."""
    section = ActivationSparsity.find_in(recipe)
    return section is not None and section.sparsity > 0


def fitted(recipe: Recipe) -> RefitOptions | None:
    """How weights will be fitted to their inputs; None where they will not."""
    section = Pack.find_in(recipe)
    if section is None:
        return None
    calibrated = Calibrate.find_in(recipe) is not None and FORMATS[section.format].fits
    options = section.refit_options(recipe).decided(calibrated)
    return options if options.fits else None


def sparse_attention(recipe: Recipe) -> AttentionOptions | None:
    """What the artifact's attention reads, where that is some of the tokens alone."""
    section = Pack.find_in(recipe)
    options = AttentionOptions() if section is None else AttentionOptions(**section.told(AttentionOptions))
    return options if options.sparse else None


def mlp_kind(recipe: Recipe) -> MlpKind:
    """How the artifact stores MLPs; dense ones where there is none."""
    section = Pack.find_in(recipe)
    return DENSE if section is None else FORMATS[section.format].mlp


def calibrated(recipe: Recipe) -> bool:
    """Whether the artifact takes something from the calibration itself, not by way of thresholds."""
    return sparse_attention(recipe) is not None or mlp_kind(recipe).by_count or fitted(recipe) is not None


def wants_calibration(recipe: Recipe, made: str) -> bool:
    """Whether somebody wants to know the model that was made under this name: thresholds are about what enters its
    matrices, heavy channels about its keys, and pruning about both."""
    prune, distil = Prune.find_in(recipe), Distil.find_in(recipe)
    by_pack = sparse(recipe) or calibrated(recipe)
    if made == "rotated":  # distilling a pruned model takes the text of its teacher's calibration
        by_text = prune is not None and prune.as_options(recipe).reads_text
        return Rotate.find_in(recipe) is not None and (by_text or bool(distil) or (not prune and by_pack))
    if made == "pruned":  # a pruned model that is distilled for skipping: thresholds that are trained begin with it
        return prune is not None and (by_pack if distil is None else bool(distil.sparsity))
    return distil is not None and by_pack


def perplexity_texts(recipe: Recipe) -> tuple[str, ...]:
    """The texts whose perplexity is measured; none without an eval section."""
    section = Eval.find_in(recipe)
    return section.perplexity if section is not None else ()


def bench_texts(recipe: Recipe) -> tuple[str, ...]:
    """The text whose tokens `bench` runs: the first one that is evaluated, else of the calibration; none: random
    tokens."""
    calibrate = Calibrate.find_in(recipe)
    return (perplexity_texts(recipe) or (calibrate.text if calibrate is not None else ()))[:1]


def skips_neurons(recipe: Recipe) -> bool:
    """Whether decoded tokens leave out inactive neurons, which transformers computes like all others."""
    section = Eval.find_in(recipe)
    return bool(mlp_kind(recipe).exact) and section is not None and section.runtime != EvalRequest.runtime


def protocols_of(recipe: Recipe) -> tuple[str, ...]:
    """The protocols of the evaluation, each once, in the order asked for."""
    section = Eval.find_in(recipe)
    some = sparse(recipe) or sparse_attention(recipe) is not None or skips_neurons(recipe)
    return tuple(dict.fromkeys(section.protocols if section else ())) or ("decode" if some else "dense",)


def evaluates_pruned(recipe: Recipe, section: Any) -> bool:
    """Whether the pruned model is measured by itself, as something is done to it; else `eval` measures just that."""
    later = Pack.find_in(recipe) is not None or sparse(recipe)
    return Prune.find_in(recipe) is not None and bool(section.perplexity) and later
