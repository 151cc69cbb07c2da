"""The table of formats: one row each, from which every other part takes what it must know of them.

Cheap to import: the command line and the recipes' schema take their choices from here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsepack.errors import PackingError
from sparsepack.models.families import check_packable

if TYPE_CHECKING:
    from sparsepack.artifacts.plan import Plan, PlanRequest
    from sparsepack.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Format:
    """A kind of artifact.

    name            -- what users and manifests call it
    summary         -- a clause for help texts
    module          -- what implements it, by two functions:
                       `plan(format, checkpoint, request) -> Plan` and `opened(container, manifest) -> Artifact`;
                       the container is a `GgufFile`, or an `ArtifactFolder` where `folder` is set
    matrices        -- type in which the blocks' matrices are stored
    folder          -- a folder of safetensors; otherwise a GGUF file
    thresholds      -- whether it carries the rules of the sites
    attention       -- whether it carries a policy for sparse attention
    weight_sparsity -- whether it leaves out pruned weights
    neurons         -- whether MLPs are stored by neurons, in the order of how often a calibration saw each active
    runs            -- whether an engine of ours runs it
    file_type       -- llama.cpp's enum llama_ftype, which viewers of GGUFs show
    """

    name: str
    summary: str
    module: str
    matrices: str
    folder: bool = False
    thresholds: bool = False
    attention: bool = False
    weight_sparsity: bool = False
    neurons: bool = False
    runs: bool = False
    file_type: int = 0

    @property
    def container(self) -> str:
        """What it lies in, for messages."""
        return "folder" if self.folder else "GGUF"

    @property
    def suffix(self) -> str:
        """What its name ends with, for those who name outputs."""
        return "" if self.folder else ".gguf"

    def plan(self, checkpoint: "Checkpoint", request: "PlanRequest") -> "Plan":
        """The artifact of a model, before any tensor of it is made; `Plan.write` makes it.

        Raises `PackingError` for what the format cannot hold, `CheckpointError` for a model that none holds.
        """
        check_packable(checkpoint.family, checkpoint.name)
        made: Plan = importlib.import_module(self.module).plan(self, checkpoint, request)
        return made


_ZIGZAG = "sparsepack.artifacts.gguf.zigzag"
_NEURON = "sparsepack.artifacts.gguf.neuron"
_PLAIN = "sparsepack.artifacts.gguf.plain"
_SLID = "sparsepack.artifacts.folder.slid"
_FOR_LLAMA_CPP = "a plain GGUF that stock llama.cpp loads"
_FOR_2_OF_4 = "a folder of a pruned model for 2:4 tensor cores"
_RUN: Mapping[str, bool] = {"thresholds": True, "attention": True, "runs": True}
_PRUNED: Mapping[str, bool] = {"folder": True, "attention": True, "weight_sparsity": True}

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("zigzag-q4_k", "skips inactive columns", _ZIGZAG, "Q4_K", file_type=14, **_RUN),
        Format(
            "neuron-q4_k",
            "also skips, exactly, inactive neurons of models with ReLU",
            _NEURON,
            "Q4_K",
            neurons=True,
            file_type=14,
            **_RUN,
        ),
        Format("q4_k", _FOR_LLAMA_CPP, _PLAIN, "Q4_K", file_type=14),
        Format("f16", _FOR_LLAMA_CPP, _PLAIN, "F16", file_type=1),
        Format("bf16", _FOR_LLAMA_CPP, _PLAIN, "BF16", file_type=32),
        Format("f32", _FOR_LLAMA_CPP, _PLAIN, "F32", file_type=0),
        Format("slide-int8", _FOR_2_OF_4, _SLID, "I8", **_PRUNED),
        Format("slide-fp8", _FOR_2_OF_4, _SLID, "F8_E4M3", **_PRUNED),
        Format("slide-bf16", _FOR_2_OF_4, _SLID, "BF16", **_PRUNED),
    )
}
DEFAULT_FORMAT = next(iter(FORMATS))


def format_of(name: str) -> Format:
    """The row of that name; raises `PackingError` naming the known ones."""
    if name not in FORMATS:
        raise PackingError(f"format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def those_with(what: str) -> str:
    """The names of the formats whose field `what` is set, for messages: "zigzag-q4_k"."""
    return " or ".join(name for name, format in FORMATS.items() if getattr(format, what))


def summaries() -> str:
    """The table as a clause for help texts: "zigzag-q4_k skips ...; q4_k, f16: a plain GGUF that ..."."""
    names: dict[str, list[str]] = {}
    for format in FORMATS.values():
        names.setdefault(format.summary, []).append(format.name)
    return "; ".join(f"{', '.join(group)}: {summary}" for summary, group in names.items()) + "."
