"""A model with its weights off the grid of the type that it is published in, and the same function.

Each input column of a matrix is multiplied by a random factor in exp(+-0.3), and what makes that input is divided by
it: the gain of the norm, the rows of v (shared by the query heads of a KV head), the rows of up. A row-wise type that
meets its own grid again loses nothing, so types are compared on rescaled weights only.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.eval.subject import open_subject
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.source_files import texts_of
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.checkpoint.writer import made_of_blocks, write_checkpoint
from sparsepack.models.heads import heads_of_config
from sparsepack.rotation.check import BOUNDS

SPREAD = 0.3
"""Factors are exp(u), u uniform in +-SPREAD."""


def rescaled_block(checkpoint: Checkpoint, layer: int, seed: int) -> Mapping[str, Tensor]:
    """Return the tensors of a block that change, in float32, by their names within the block."""
    family, heads = checkpoint.family, heads_of_config(checkpoint.config)
    generator = torch.Generator().manual_seed(seed * checkpoint.layers + layer)
    made: dict[str, Tensor] = {}

    def weight(module: str) -> Tensor:
        name = f"{module}.weight"
        return made[name] if name in made else checkpoint.tensor(f"{family.block(layer)}.{name}").float()

    def factors(count: int) -> Tensor:
        return torch.exp(SPREAD * (2 * torch.rand(count, generator=generator) - 1))

    def multiply_columns(site: str, by: Tensor) -> None:
        for projection in family.projections[site]:
            made[f"{projection}.weight"] = weight(projection) * by

    for site, named in (("attn_in", "attn_norm"), ("mlp_in", "mlp_norm")):
        norm = family.norms[named]
        by = factors(len(weight(norm)))
        multiply_columns(site, by)
        made[f"{norm}.weight"] = (weight(norm) + family.norm_offset) / by - family.norm_offset
    value, up = family.projections["attn_in"][-1], family.projections["mlp_in"][-1]
    for site, rows in (("attn_out", value), ("mlp_mid", up)):
        by = factors(len(weight(rows)))
        made[f"{rows}.weight"] = weight(rows) / by[:, None]
        if site == "attn_out":  # [KV heads, size] -> one factor for each channel of each query head
            by = by.view(heads.kv_heads, -1).repeat_interleave(heads.heads // heads.kv_heads, dim=0).flatten()
        multiply_columns(site, by)
    return made


def write_rescaled(model: str, output: Path, seed: int = 0) -> float:
    """Write a model rescaled, in float32, as a Hugging Face folder; return by how much its logits differ, over their
    norm. Raises `RuntimeError` where that is more than float32 explains."""
    checkpoint = open_checkpoint(model, hashed=True)
    shapes = checkpoint.source.shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    source = changed_source(checkpoint.source, lambda name: checkpoint.tensor(name).float(), entries)
    made = made_of_blocks(replace(checkpoint, source=source), lambda layer: rescaled_block(checkpoint, layer, seed))
    write_checkpoint(made, texts_of(checkpoint), {}, output, overwrite=True)
    ids = torch.arange(64).mul(37).remainder(checkpoint.config.vocab_size)[None]
    lengths, nowhere = torch.tensor([64]), torch.tensor([64])
    before, after = (open_subject(name).scorer().logits(ids, lengths, nowhere) for name in (model, str(output)))
    error = float((after - before).norm() / before.norm())
    if not error <= BOUNDS[torch.float32]:
        raise RuntimeError(f"{model}: rescaled, its logits differ by {error:.2g} of their norm")
    return error
