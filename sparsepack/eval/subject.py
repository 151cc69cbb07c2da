"""What can be evaluated: a checkpoint, a checkpoint with a thresholds table, or an artifact.

All become a stock transformers model with the sites' rules beside it, so one code path measures them all.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.eval.scorer import SparseScorer
from sparsepack.files.gguf import read_gguf
from sparsepack.models.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import FAMILIES, SITES, Family
from sparsepack.models.rule import Rules
from sparsepack.models.whole import build_model, load_model
from sparsepack.sparsity.thresholds import Thresholds


@dataclass(frozen=True)
class Subject:
    """A model under evaluation. `source_sha256` is the hash of the checkpoint it is, or was made from."""

    name: str
    kind: str  # "checkpoint", "zigzag-q4_k", "q4_k", ...
    model: Any
    tokenizer: Any
    family: Family
    rules: Rules
    source_sha256: str
    target_sparsity: float

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
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        metadata = read_gguf(path).metadata
        packed_by_us = "sparsepack.manifest" in metadata
        if packed_by_us and thresholds is not None and metadata.get("general.architecture") == "sparsepack":
            raise UserError(f"{name}: carries its own thresholds; give --thresholds with a checkpoint only")
        if metadata.get("general.architecture") == "sparsepack":
            return _zigzag(path, device, torch_dtype)
        if packed_by_us:
            return _plain(path, thresholds, device, torch_dtype)
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
    )


def _zigzag(path: Path, device: str, dtype: torch.dtype) -> Subject:
    from sparsepack.artifacts.gguf.zigzag import dequantised, read_zigzag, stock_config

    packed = read_zigzag(path)
    architecture = packed.architecture
    table = packed.manifest.get("thresholds") or {}
    return Subject(
        name=str(path),
        kind=packed.manifest["kind"],
        model=build_model(stock_config(packed), dequantised(packed), device, dtype),
        tokenizer=artifact_tokenizer(packed.tokenizer_json, architecture.bos, architecture.eos),
        family=FAMILIES[architecture.model_type],
        rules=packed.rules,
        source_sha256=packed.manifest["model"]["sha256"],
        target_sparsity=float(table.get("sparsity", 0.0)),
    )


def _plain(path: Path, thresholds: Thresholds | None, device: str, dtype: torch.dtype) -> Subject:
    from sparsepack.artifacts.gguf.plain_reader import open_plain

    plain = open_plain(path)
    if thresholds is not None and thresholds.model_sha256 != plain.manifest["model"]["sha256"]:
        raise UserError(f"{path}: the thresholds are of another model than the one this file was made from")
    return Subject(
        name=str(path),
        kind=plain.manifest["kind"],
        model=build_model(plain.config, plain.tensor, device, dtype),
        tokenizer=plain.tokenizer,
        family=FAMILIES[plain.config.model_type],
        rules=thresholds.rules if thresholds else {},
        source_sha256=plain.manifest["model"]["sha256"],
        target_sparsity=thresholds.sparsity if thresholds else 0.0,
    )


def artifact_tokenizer(tokenizer_json: str, bos: int | None, eos: tuple[int, ...]) -> Any:
    """The tokenizer inside a zigzag artifact, as transformers wraps it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tokenizer_json)
    special = {"bos_token": bos, "eos_token": eos[0] if eos else None}
    words = {name: backend.id_to_token(id) for name, id in special.items() if id is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **words)
