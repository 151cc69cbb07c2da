"""Read back a plain GGUF that sparsepack packed: weights under Hugging Face's names, configuration, manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsepack.artifacts.gguf.integrity import check_header, check_tensors
from sparsepack.artifacts.manifest import read_manifest
from sparsepack.codecs.matrices import decode_rows
from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import GgufFile, read_gguf
from sparsepack.models.checkpoint import EMBEDDING, HEAD
from sparsepack.models.families import FAMILIES
from sparsepack.models.gguf_config import gguf_config
from sparsepack.models.gguf_names import gguf_names, unpermute_rotary


@dataclass(frozen=True)
class PlainModel:
    """A plain GGUF of ours, its hashes checked."""

    file: GgufFile
    config: Any
    manifest: Mapping[str, Any]

    @cached_property
    def _names(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in gguf_names(self.config.num_hidden_layers).items()}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, from the vocabulary inside."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.file.path.parent), gguf_file=self.file.path.name)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor decoded to float32, by its Hugging Face name, rotary rows back in Hugging Face's order."""
        if name == HEAD and self._names[name] not in self.file.tensors:
            name = EMBEDDING
        gguf_name = self._names.get(name, "")
        if gguf_name not in self.file.tensors:
            raise ArtifactError(f"{self.file.path}: the tensor {name} is missing; pack the model again")
        info = self.file.tensors[gguf_name]
        stored = torch.from_numpy(self.file.bytes(gguf_name).copy())
        rows = stored.reshape(*info.shape[:-1], -1) if len(info.shape) > 1 else stored[None]
        value = decode_rows(rows, info.type).reshape(info.shape)
        if FAMILIES[self.config.model_type].gguf_permuted:
            heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
            for projection, count in heads.items():
                if f"{projection}." in name:
                    return unpermute_rotary(value, count)
        return value


def open_plain(path: Path) -> PlainModel:
    """Open a plain GGUF made by `write_plain` and check all its hashes; raises `ArtifactError`."""
    check_header(path)
    file = read_gguf(path)
    check_tensors(file)
    return PlainModel(file, gguf_config(file, str(path)), read_manifest(file))
