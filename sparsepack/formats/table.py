"""The table of formats: one row each, from which every other part takes what it must know of them.

Cheap to import: the command line and the recipes' schema take their choices from here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.formats.blocks.table import BLOCKS, ZIGZAG_BLOCKS
from sparsepack.formats.kinds import DENSE, NEURONS, MatrixFormat, MlpKind

if TYPE_CHECKING:
    from sparsepack.formats.plan import Plan, PlanRequest, SiteEncoder
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.family import Family


@dataclass(frozen=True)
class Format:
    """A kind of artifact.

    name            -- what users and manifests call it
    summary         -- a clause for help texts
    module          -- what implements it, by three functions: `check_model(format, checkpoint)`,
                       `plan(format, checkpoint, request) -> Plan` and `opened(container, manifest) -> Artifact`;
                       the container is a `GgufFile`, or an `ArtifactFolder` where `folder` is set; and by
                       `encoder(format, checkpoint, request) -> SiteEncoder` where `fits` is
    matrices        -- how the matrices of the model's blocks are stored, in the order of their MLPs
    folder          -- a folder of safetensors; otherwise a GGUF file
    thresholds      -- whether it carries the rules of the sites
    attention       -- whether it carries a policy for sparse attention
    weight_sparsity -- whether it leaves out pruned weights
    bases           -- whether it has a place for changes of basis between blocks
    experts         -- whether it has a place for MLPs that are mixtures of experts
    fits            -- whether its matrices can be fitted to their inputs and quantised with error feedback
    fits_experts    -- whether those of experts can, too; else they are rounded to nearest
    mlp             -- how MLPs are stored
    runs            -- whether an engine of ours runs it
    """

    name: str
    summary: str
    module: str
    matrices: MatrixFormat
    folder: bool = False
    thresholds: bool = False
    attention: bool = False
    weight_sparsity: bool = False
    bases: bool = False
    experts: bool = False
    fits: bool = False
    fits_experts: bool = False
    mlp: MlpKind = DENSE
    runs: bool = False

    @property
    def levels(self) -> tuple[int, ...]:
        """Bits of a weight that readers of its first plane, of two, ... know; empty: it has no planes."""
        return BLOCKS[self.matrices.block].levels

    @property
    def bits(self) -> float:
        """Bits that a weight takes in its blocks, scales included."""
        return BLOCKS[self.matrices.block].bits

    @property
    def container(self) -> str:
        """What it lies in, for messages."""
        return "folder" if self.folder else "GGUF"

    @property
    def suffix(self) -> str:
        """What its name ends with, for those who name outputs."""
        return "" if self.folder else ".gguf"

    def lacks(self, family: "Family") -> str:
        """What models of a family have that the format has no place for; empty: it has for everything."""
        if family.experts is not None and not self.experts:
            return "mixtures of experts"
        if self.mlp is not NEURONS or family.unpackable:
            return ""
        if family.activation not in ("", "relu", "relu2"):
            return f"of {family.activation}, whose neurons are never exactly zero"
        if "mlp_sub_norm" in family.norms:
            return "with a norm before their down matrices"
        return "" if "mlp_norm" in family.norms else "without a norm before them"

    def check_model(self, checkpoint: "Checkpoint") -> None:
        """Whether the format can hold a model: ask once, before anything is found for it.

        Raises `PackingError` for a model that another format may hold, `CheckpointError` for one that none holds.
        """
        if checkpoint.bases and not self.bases:
            raise PackingError(
                f"{checkpoint.name}: its residual stream changes its basis before block {checkpoint.bases[0]}, for "
                f"which {self.name} has no place; pack as {those_with('bases')}, or rotate it with one basis"
            )
        if lacks := self.lacks(checkpoint.family):
            others = " or ".join(name for name, row in FORMATS.items() if not row.lacks(checkpoint.family))
            raise PackingError(
                f"{checkpoint.name}: its MLPs are {lacks}, for which {self.name} has no place; pack as {others}"
            )
        self._implementation.check_model(self, checkpoint)

    def plan(self, checkpoint: "Checkpoint", request: "PlanRequest") -> "Plan":
        """The artifact of a model that `check_model` lets pass, before any tensor of it is made; `Plan.write` makes it.

        Raises `PackingError` for a request that does not fit the model or the format.
        """
        made: Plan = self._implementation.plan(self, checkpoint, request)
        return made

    def encoder(self, checkpoint: "Checkpoint", request: "PlanRequest") -> "SiteEncoder":
        """What encodes a model's sites one by one, where `fits` is set: `plan` takes its tensors in `request.encoded`.

        Raises as `plan`.
        """
        made: SiteEncoder = self._implementation.encoder(self, checkpoint, request)
        return made

    @property
    def _implementation(self) -> Any:
        return importlib.import_module(self.module)


_ZIGZAG = "sparsepack.formats.zigzag.plan"
_NEURON = "sparsepack.formats.neuron"
_PLAIN = "sparsepack.formats.plain"
_SLID = "sparsepack.formats.slide"
_PLANES = "sparsepack.formats.planes"
_FOR_LLAMA_CPP = "a plain GGUF that stock llama.cpp loads"
_FOR_2_OF_4 = "a folder of a pruned model for 2:4 tensor cores"
_SKIPS = "skips inactive columns"
_RUN: Mapping[str, Any] = {"thresholds": True, "attention": True, "bases": True, "runs": True}
_PRUNED: Mapping[str, Any] = {"folder": True, "attention": True, "weight_sparsity": True}

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        *(
            Format(
                f"zigzag-{block.lower()}",
                "reads fewer bits of a column the smaller its input is" if BLOCKS[block].levels else _SKIPS,
                _ZIGZAG,
                MatrixFormat(block, "zigzag"),
                experts=True,
                fits=block in ("Q4_K", "Q6_P"),
                fits_experts=block in ("Q4_K", "Q6_P"),
                **_RUN,
            )
            for block in ZIGZAG_BLOCKS
        ),
        Format(
            "neuron-q4_k",
            "also skips, exactly, inactive neurons of models with ReLU",
            _NEURON,
            MatrixFormat("Q4_K", "neuron"),
            fits=True,
            mlp=NEURONS,
            **_RUN,
        ),
        Format("q4_k", _FOR_LLAMA_CPP, _PLAIN, MatrixFormat("Q4_K"), experts=True, fits=True),
        *(
            Format(block.lower(), _FOR_LLAMA_CPP, _PLAIN, MatrixFormat(block), experts=True)
            for block in ("Q6_K", "Q8_0", "F16", "BF16", "F32")
        ),
        Format("slide-int8", _FOR_2_OF_4, _SLID, MatrixFormat("I8", "slide"), fits=True, **_PRUNED),
        Format("slide-fp8", _FOR_2_OF_4, _SLID, MatrixFormat("F8_E4M3", "slide"), fits=True, **_PRUNED),
        Format("slide-bf16", _FOR_2_OF_4, _SLID, MatrixFormat("BF16", "slide"), **_PRUNED),
        Format(
            "planes-q6_p",
            "zigzag-q6_p as a folder for transformers and vLLM",
            _PLANES,
            MatrixFormat("Q6_P", "planes"),
            folder=True,
            thresholds=True,
            attention=True,
            fits=True,
        ),
    )
}
DEFAULT_FORMAT = next(iter(FORMATS))


def format_of(name: str) -> Format:
    """The row of that name; raises `PackingError` naming the known ones."""
    if name not in FORMATS:
        raise PackingError(f"format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def holders(checkpoint: "Checkpoint") -> str:
    """Which formats can hold a model, as a sentence for people; or that none can, and why the default one cannot."""
    from sparsepack.models.provenance import PRUNING_FILE

    able: list[str] = []
    reasons: dict[str, str] = {}
    not_yet = "" if (checkpoint.path / PRUNING_FILE).is_file() else " once pruned"
    for name, format in FORMATS.items():
        try:
            format.check_model(checkpoint)
        except (CheckpointError, PackingError) as error:
            reasons[name] = str(error)
        else:
            able.append(name + not_yet * format.weight_sparsity)
    reason = reasons.get(DEFAULT_FORMAT)
    if not able:
        return f"no format can hold {checkpoint.name}: {reason}"
    cannot = "" if reason is None else f"; {DEFAULT_FORMAT} cannot: {reason}"
    return f"formats that can hold {checkpoint.name}: {', '.join(able)}{cannot}"


def those_with(what: str) -> str:
    """The names of the formats whose field `what`, "runs" or "mlp.exact" for one, is set, for messages."""
    return " or ".join(name for name, format in FORMATS.items() if attrgetter(what)(format))


def summaries() -> str:
    """The table as a clause for help texts: "zigzag-q4_k skips ...; q4_k, f16: a plain GGUF that ..."."""
    names: dict[str, list[str]] = {}
    for format in FORMATS.values():
        names.setdefault(format.summary, []).append(format.name)
    return "; ".join(f"{', '.join(group)}: {summary}" for summary, group in names.items()) + "."
