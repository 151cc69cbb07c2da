"""The same model with each segment of its blocks in a random basis of its own, as a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.configuration import segmented_config
from sparsepack.models.checkpoint.writer import texts_of
from sparsepack.models.family import HEAD


def orthogonal(width: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]


def write_segments(checkpoint: Checkpoint, starts: Sequence[int], folder: Path) -> Path:
    """A folder with the checkpoint's function in float32, whose residual stream changes its basis before the blocks at
    `starts`; of block 0, the embedding keeps its own basis."""
    family, names = checkpoint.family, checkpoint.source.shapes
    tensors = {name: checkpoint.tensor(name).double().numpy() for name in {*names, HEAD}}
    q = np.eye(tensors[HEAD].shape[1]) if 0 in starts else orthogonal(tensors[HEAD].shape[1], 100)
    tensors[family.embedding] = tensors[family.embedding] @ q
    for layer in range(checkpoint.layers):
        block = family.block(layer)
        if layer in starts:
            before, q = q, orthogonal(len(q), layer)
            tensors[family.basis(layer)] = q.T @ before
        for site, norm in (("attn_in", "attn_norm"), ("mlp_in", "mlp_norm")):
            scale = tensors[f"{block}.{family.norms[norm]}.weight"]
            for name in family.projections[site]:
                tensors[f"{block}.{name}.weight"] = tensors[f"{block}.{name}.weight"] * scale @ q
            tensors[f"{block}.{family.norms[norm]}.weight"] = np.ones_like(scale)
        for site in ("attn_out", "mlp_mid"):
            for name in family.projections[site]:
                tensors[f"{block}.{name}.weight"] = q.T @ tensors[f"{block}.{name}.weight"]
                if f"{block}.{name}.bias" in names:
                    tensors[f"{block}.{name}.bias"] = q.T @ tensors[f"{block}.{name}.bias"]
    tensors[HEAD] = tensors[HEAD] * tensors["model.norm.weight"] @ q
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    folder.mkdir(parents=True)
    for name, text in texts_of(checkpoint).items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(segmented_config(json.dumps(config), starts))
    stored = {
        name: torch.from_numpy(np.ascontiguousarray(value)).float().view(value.shape) for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def segmented(model: Path, starts: Sequence[int], folder: Path) -> Checkpoint:
    return open_checkpoint(write_segments(open_checkpoint(model), starts, folder))
