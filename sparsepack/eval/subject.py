"""What can be evaluated: a checkpoint, a checkpoint with a thresholds table, or an artifact.

All become a stock transformers model with the sites' rules beside it, so one code path measures them all. On a CPU
windows of text are scored block by block, as the weights are read; on a GPU, and for tasks, by the whole model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.errors import UserError
from sparsepack.eval.protocols import Subject
from sparsepack.eval.scorer import OfLevels, SparseScorer, StreamedScorer, TransformersScorer
from sparsepack.files.tensors import arithmetic, type_name
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.manifest import source_made_from
from sparsepack.formats.open import is_artifact, open_artifact
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import BASIS, Family
from sparsepack.models.hf_config import token_weights
from sparsepack.models.hf_model.model import BlockSource, Places, build_model, parameter_shapes, places_of
from sparsepack.models.provenance import made_from
from sparsepack.models.sites import Rules, SiteKey


@dataclass(frozen=True, kw_only=True)
class TransformersSubject(Subject):
    """A subject that transformers runs.

    source  -- its weights, read when they are needed
    weights -- the type in which its matrices are stored
    dtype   -- the type in which it is computed, on `device`
    inputs  -- what the inputs of sites are quantised to, token by token
    of_levels -- of sites whose rules have levels, their weights at each; None: no rules have
    """

    source: BlockSource
    rules: Rules
    weights: str
    dtype: torch.dtype
    device: str
    inputs: Mapping[SiteKey, torch.dtype] = field(default_factory=dict)
    of_levels: OfLevels | None = None

    @property
    def family(self) -> Family:
        """The model's family."""
        return self.source.family

    @property
    def precision(self) -> dict[str, str]:
        """The type of quantised inputs is there, too, as `inputs`."""
        inputs = ", ".join(sorted({type_name(dtype) for dtype in self.inputs.values()}))
        return {"weights": self.weights, "dtype": type_name(self.dtype), **({"inputs": inputs} if inputs else {})}

    @cached_property
    def model(self) -> Any:
        """The whole stock model in memory, in `dtype`: on one device, or over all GPUs where one has no room for it."""
        source = self.source
        return build_model(source.config, source.tensor, self.device, self.dtype, source.bases, self._places)

    def _places(self, model: Any) -> Places | None:
        places = places_of(model, self.device, self.dtype)
        if places is not None and self.attention is not None:
            raise UserError(
                f"{self.name}: larger than one GPU, and a model with sparse attention cannot be spread over several; "
                "use --device cpu"
            )
        return places

    @cached_property
    def sparse(self) -> bool:
        return self.attention is not None or any(not rule.dense for rule in self.rules.values())

    def scorer(self) -> TransformersScorer:
        """A scorer that runs block by block on a CPU, and in a family without a row."""
        if self.device == "cpu" or not self.family.has_row:
            numbers = (self.context, self.dtype, self.inputs, self.attention)
            return StreamedScorer(self.source, self.rules, *numbers, self.device, of_levels=self.of_levels)
        return self.task_scorer()

    def task_scorer(self) -> TransformersScorer:
        """A scorer of the whole model in memory; in a family without a row that of `scorer`."""
        if not self.family.has_row:
            return self.scorer()
        numbers = (self.context, self.inputs, self.attention, self.of_levels)
        return SparseScorer(self.model, self.family, self.rules, *numbers)

    def parameters(self) -> dict[SiteKey, int]:
        shapes = parameter_shapes(self.source.config, self.source.bases)
        sites = {
            (layer, site): token_weights(self.source.config, shapes, layer, site)
            for layer in range(self.source.layers)
            for site in self.family.projections_of(layer)
        }
        return sites | {(layer, BASIS): math.prod(shapes[self.family.basis(layer)]) for layer in self.source.bases}


def open_subject(
    name: str, thresholds: Thresholds | None = None, device: str = "cpu", dtype: str = "float32"
) -> TransformersSubject:
    """Open anything that can be evaluated; reads no weights yet.

    dtype -- what it is computed in, "auto" as `files.tensors.arithmetic` has it

    Raises `UserError` subclasses saying what does not fit.
    """
    if is_artifact(Path(name)):
        return _artifact(open_artifact(Path(name)), thresholds, device, dtype)
    return _checkpoint(open_checkpoint(name, hashed=True), thresholds, device, dtype)


def _checkpoint(checkpoint: Checkpoint, thresholds: Thresholds | None, device: str, dtype: str) -> TransformersSubject:
    if thresholds is not None:
        thresholds.check_model(checkpoint)
        if any(rule.of_levels for rule in thresholds.rules.values()):
            raise UserError(f"{checkpoint.name}: thresholds of planes, which a checkpoint has none of; pack it first")
    return TransformersSubject(
        name=checkpoint.name,
        kind="checkpoint",
        source=checkpoint,
        context=int(checkpoint.config.max_position_embeddings),
        tokenizer=checkpoint.tokenizer,
        end_tokens=checkpoint.end_tokens,
        rules=thresholds.rules if thresholds else {},
        source_sha256=checkpoint.sha256,
        sparsity=thresholds.sparsity if thresholds else 0.0,
        weights=type_name(checkpoint.dtype),
        dtype=arithmetic(dtype, checkpoint.dtype, device),
        device=device,
        sparse_sites=thresholds.may_skip() if thresholds else (),
        made_from=made_from(checkpoint.path),
        attention=None,
    )


def _artifact(artifact: Artifact, thresholds: Thresholds | None, device: str, dtype: str) -> TransformersSubject:
    path, source_sha256 = artifact.path, artifact.manifest["model"]["sha256"]
    if thresholds is not None and artifact.format.thresholds:
        raise UserError(f"{path}: carries its own thresholds; give --thresholds with a checkpoint only")
    if thresholds is not None and thresholds.model_sha256 != source_sha256:
        raise UserError(f"{path}: the thresholds are of another model than the one this was made from")
    artifact.check_bytes()
    stock = artifact.stock()
    made_from = stock.config.dtype if isinstance(stock.config.dtype, torch.dtype) else torch.float32
    own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(artifact.format.matrices.block, made_from)
    return TransformersSubject(
        name=str(path),
        kind=artifact.format.name,
        source=stock,
        context=int(stock.config.max_position_embeddings),
        tokenizer=stock.tokenizer,
        end_tokens=artifact.packed().architecture.eos if artifact.format.runs else stock.end_tokens,
        rules=thresholds.rules if thresholds else stock.rules,
        source_sha256=source_sha256,
        sparsity=thresholds.sparsity if thresholds else stock.sparsity,
        weights=artifact.format.matrices.block,
        dtype=arithmetic(dtype, own, device),
        device=device,
        sparse_sites=thresholds.may_skip() if thresholds else stock.sparse_sites,
        inputs=stock.inputs,
        made_from=source_made_from(artifact.manifest),
        attention=stock.attention,
        of_levels=stock.of_levels,
    )
