"""What a recipe may say: one model per section, unknown keys are errors, nothing is coerced.

Paths (model, texts, task_path) are taken as written, so relative ones resolve against the working directory, not
against the recipe's folder. A section that is absent or null is left out of the run.
"""

from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparsepack.artifacts.formats import DEFAULT_FORMAT, FORMATS
from sparsepack.codecs.types import TYPES

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Protocol = Literal["decode", "all", "dense"]


def _listed(value: Any) -> Any:
    """One name stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]


def _one_of(table: Collection[str]) -> Callable[[str], str]:
    """A name in a table; raises ValueError naming what is there."""

    def checked(name: str) -> str:
        if name not in table:
            raise ValueError(f"expected one of {', '.join(table)}")
        return name

    return checked


MatrixType = Annotated[str, AfterValidator(_one_of(("auto", *TYPES)))]


class Section(BaseModel):
    """What all sections share."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Calibrate(Section):
    """`calibrate.run.CalibrateOptions`, and the text: one name or several, read as one text."""

    text: Names = Field(min_length=1)
    context: Annotated[int, Field(ge=2)] = 2048
    samples: Annotated[int, Field(ge=0)] = 64
    seed: Seed = 0
    sinks: Annotated[int, Field(ge=0)] = 4
    batch: Count = 2


class Activation(Section):
    """`sparsity.allocation.AllocationOptions`."""

    sparsity: Annotated[float, Field(ge=0, lt=1)]
    allocation: Literal["uniform", "teal", "global"] = "uniform"
    criterion: Literal["magnitude", "column-norm"] = "magnitude"
    include: Names = ()
    ignore: Names = ()
    upstream: Literal["sparse", "dense"] = "sparse"
    windows: Count = 16
    offsets: bool = False
    steps: Count = 120
    batch: Count = 2
    length: Annotated[int, Field(ge=2)] = 1024
    seed: Seed = 0


class Pack(Section):
    """What `pack.PackRequest` takes."""

    format: Annotated[str, AfterValidator(_one_of(FORMATS))] = DEFAULT_FORMAT
    output_type: MatrixType = "auto"
    embedding_type: MatrixType = "auto"


class Eval(Section):
    """What `eval.run.EvalRequest` takes, once per protocol; no protocols: decode for a sparse model, else dense."""

    perplexity: Names = ()
    protocols: Annotated[tuple[Protocol, ...], BeforeValidator(_listed)] = ()
    context: Annotated[int, Field(ge=2)] = 2048
    windows: Count | None = None
    tasks: Names = ()
    task_path: str | None = None
    limit: Count | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    batch: Count = 1


class Bench(Section):
    """What `bench.decode.BenchSettings` takes; the tokens are of the first evaluation text where there is one."""

    prompt: Annotated[int, Field(ge=0)] = 512
    generate: Annotated[int, Field(ge=0)] = 128
    repetitions: Count = 5
    threads: Count | None = None
    seed: Seed = 0


class Generate(Section):
    """What `runtime.generate.generate` takes."""

    prompt: str
    tokens: Count = 48
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed = 0


class Limit(Section):
    """The values that pass: `min <= value <= max`."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _some_value_passes(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("expected min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: nothing could pass")
        return self


class Gates(Section):
    """Limits on what was measured; the fields of `ROW_GATES` apply to every perplexity row (text and protocol).

    realised_sparsity -- over the sites that may be sparse, as the target is; only rows of sparse protocols count
    bits_per_weight   -- of the whole file
    tasks             -- task -> metric -> limit
    verify            -- the artifact must have been verified (a verification that fails always fails the run)
    """

    perplexity: Limit | None = None
    perplexity_ratio: Limit | None = None
    kl_divergence: Limit | None = None
    top_token_agreement: Limit | None = None
    bits_per_byte: Limit | None = None
    realised_sparsity: Limit | None = None
    bits_per_weight: Limit | None = None
    file_bytes: Limit | None = None
    tasks: dict[str, dict[str, Limit]] = {}
    verify: bool = False


ROW_GATES = (
    "perplexity",
    "perplexity_ratio",
    "kl_divergence",
    "top_token_agreement",
    "bits_per_byte",
    "realised_sparsity",
)
FILE_GATES = ("bits_per_weight", "file_bytes")


class Recipe(Section):
    """A whole recipe."""

    version: Literal[1] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    model: Annotated[str, Field(min_length=1)]
    device: Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    calibrate: Calibrate | None = None
    activation: Activation | None = None
    pack: Pack | None = None
    verify: bool = False
    eval: Eval | None = None
    bench: Bench | None = None
    generate: Generate | None = None
    gates: Gates | None = None

    @property
    def sparse(self) -> bool:
        """Whether decoding will skip anything."""
        return self.activation is not None and self.activation.sparsity > 0

    def protocols(self) -> tuple[str, ...]:
        """The evaluation's protocols, each once, in the order asked for."""
        asked = self.eval.protocols if self.eval is not None else ()
        return tuple(dict.fromkeys(asked)) or ("decode" if self.sparse else "dense",)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values, defaults included."""
        return self.model_dump(mode="json", by_alias=True)
