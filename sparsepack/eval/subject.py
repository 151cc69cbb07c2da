"""What can be evaluated: a checkpoint, a checkpoint with a thresholds table, or an artifact.

All become a stock transformers model with the sites' rules beside it, so one code path measures them all.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsepack.artifacts.artifact import Artifact
from sparsepack.artifacts.open import is_artifact, open_artifact
from sparsepack.errors import UserError
from sparsepack.eval.scorer import SparseScorer
from sparsepack.models.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import SITES, Family
from sparsepack.models.rule import Rules
from sparsepack.models.whole import build_model, load_model
from sparsepack.sparsity.thresholds import Thresholds


@dataclass(frozen=True)
class Subject:
    """A model under evaluation. `source_sha256` is the hash of the checkpoint it is, or was made from."""

    name: str
    kind: str  # "checkpoint", or the name of a format
    model: Any
    tokenizer: Any
    family: Family
    rules: Rules
    source_sha256: str
    target_sparsity: float
    sparse_sites: Collection[Any] = ()  # (layer, site) of those that may be sparse

    @property
    def context(self) -> int:
        """Positions the model was made for."""
        return int(self.model.config.max_position_embeddings)

    @cached_property
    def sparse(self) -> bool:
        """Whether any site skips anything."""
        return any(not rule.dense for rule in self.rules.values())

    def scorer(self) -> SparseScorer:
        """A scorer over this model with its rules, counts at zero."""
        return SparseScorer(self.model, self.family, self.rules, self.context)

    def parameter_shares(self) -> dict[tuple[int, str], float]:
        """Each site's share of the parameters of all sites."""
        sizes = {}
        for layer, block in enumerate(self.model.model.layers):
            for site in SITES:
                names = self.family.projections[site]
                sizes[layer, site] = sum(block.get_submodule(name).weight.numel() for name in names)
        total = sum(sizes.values())
        return {key: size / total for key, size in sizes.items()}


def open_subject(
    name: str, thresholds: Thresholds | None = None, device: str = "cpu", dtype: str = "float32"
) -> Subject:
    """Open anything that can be evaluated. Raises `UserError` subclasses saying what does not fit."""
    torch_dtype = getattr(torch, dtype)
    if is_artifact(Path(name)):
        return _artifact(open_artifact(Path(name)), thresholds, device, torch_dtype)
    return _checkpoint(open_checkpoint(name), thresholds, device, torch_dtype)


def _checkpoint(checkpoint: Checkpoint, thresholds: Thresholds | None, device: str, dtype: torch.dtype) -> Subject:
    if thresholds is not None:
        thresholds.check_model(checkpoint)
    return Subject(
        name=checkpoint.name,
        kind="checkpoint",
        model=load_model(checkpoint, device, dtype),
        tokenizer=checkpoint.tokenizer,
        family=checkpoint.family,
        rules=thresholds.rules if thresholds else {},
        source_sha256=checkpoint.sha256,
        target_sparsity=thresholds.sparsity if thresholds else 0.0,
        sparse_sites=thresholds.may_skip() if thresholds else (),
    )


def _artifact(artifact: Artifact, thresholds: Thresholds | None, device: str, dtype: torch.dtype) -> Subject:
    path, source_sha256 = artifact.path, artifact.manifest["model"]["sha256"]
    if thresholds is not None and artifact.format.thresholds:
        raise UserError(f"{path}: carries its own thresholds; give --thresholds with a checkpoint only")
    if thresholds is not None and thresholds.model_sha256 != source_sha256:
        raise UserError(f"{path}: the thresholds are of another model than the one this was made from")
    artifact.check_bytes()
    stock = artifact.stock()
    return Subject(
        name=str(path),
        kind=artifact.format.name,
        model=build_model(stock.config, stock.tensor, device, dtype),
        tokenizer=stock.tokenizer,
        family=stock.family,
        rules=thresholds.rules if thresholds else stock.rules,
        source_sha256=source_sha256,
        target_sparsity=thresholds.sparsity if thresholds else stock.target_sparsity,
        sparse_sites=thresholds.may_skip() if thresholds else stock.sparse_sites,
    )
