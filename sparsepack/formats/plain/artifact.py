"""An opened plain GGUF of ours: what its tensors are, and the stock model of which they are the weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.formats.artifact import Program
from sparsepack.formats.containers.gguf.container import GgufArtifact
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import those_with
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, HEAD, Checkpoint
from sparsepack.models.checkpoint.configuration import check_sizes
from sparsepack.models.checkpoint.experts import fused_tensor, part_shapes, part_tensor
from sparsepack.models.checkpoint.gguf_config import (
    ROTARY_FACTORS,
    gguf_config,
    gguf_names,
    permute_rotary,
    unpermute_rotary,
)
from sparsepack.models.families import FAMILIES, family_of
from sparsepack.models.family import Family
from sparsepack.models.tokenizer.tokenizer import gguf_tokenizer


@dataclass(frozen=True)
class PlainArtifact(GgufArtifact):
    """A plain GGUF of ours."""

    def packed(self) -> PackedModel:
        raise ArtifactError(
            f"{self.path}: a plain {self.format.name.upper()} GGUF, expected a zigzag one: run it with llama.cpp, "
            f"or pack the model again as {those_with('runs')}"
        )

    def stock(self) -> StockModel:
        config = gguf_config(self.file, str(self.path))
        family = family_of(config.model_type, str(self.path))
        check_sizes(config, str(self.path))
        names = {theirs: ours for ours, theirs in gguf_names(family, config.num_hidden_layers).items()}
        heads = {"q_proj": config.num_attention_heads, "k_proj": family.setting(config, "num_key_value_heads")}

        def part(name: str) -> Tensor:
            """One tensor by its Hugging Face name, rotary rows back in Hugging Face's order."""
            if name == HEAD and names[name] not in self.tensors:
                name = EMBEDDING
            if names.get(name) not in self.tensors:
                raise ArtifactError(f"{self.path}: the tensor {name} is missing; pack the model again")
            value = self.decoded(names[name]) - family.norm_offset_of(name)
            if is_shared_gate(family, name):
                return value[None]
            if family.gguf_permuted:
                for projection, count in heads.items():
                    if f"{projection}." in name:
                        return unpermute_rotary(value, count)
            return value

        def tensor(name: str) -> Tensor:
            return fused_tensor(family, name, part)

        return StockModel(config, tensor, gguf_tokenizer(self.file, str(self.path)))

    def holds_weights(self, name: str) -> bool:
        return name not in ROTARY_FACTORS

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        source = gguf_names(checkpoint.family, checkpoint.layers).get(name, "")
        shapes = checkpoint.source.shapes
        if source not in (*shapes, HEAD) and source not in part_shapes(checkpoint.family, shapes):
            return None
        return llama_cpp_rows(checkpoint, source, part_tensor(checkpoint.family, source, checkpoint.tensor))

    def programs(self) -> Iterator[Program]:
        yield Program("llama.cpp", True, "runs it, dense")
        yield Program("gguf-py, GGUF viewers", True, "show and dequantise each tensor")
        lost = self._lost_in_transformers()
        what = f"leaves out {lost}: the model would be another" if lost else "dequantises it on loading (gguf_file=)"
        yield Program("transformers", not lost, what)
        yield Program("sparsepack", True, "reads it as a source model; evaluates, inspects and verifies it")

    def _lost_in_transformers(self) -> str | None:
        """Which of the model's numbers transformers (5.23) does not take from a GGUF."""
        metadata = self.file.metadata
        kind = metadata.get("general.architecture")
        if f"{kind}.rope.scaling.type" in metadata or not self.tensors.keys().isdisjoint(ROTARY_FACTORS):
            return "the rotary scaling"
        if kind == "llama" and f"{kind}.expert_count" in metadata:
            return "the experts"
        if any(name.endswith("attn_output.bias") for name in self.tensors):
            return "the biases"
        heads = {family.gguf_head for family in FAMILIES.values() if family.gguf == kind and family.gguf_head}
        if heads and metadata.get(f"{kind}.attention.key_length") not in heads:
            return "the head size"
        return None


def is_shared_gate(family: Family, name: str) -> bool:
    """Whether a tensor is what llama.cpp has as a vector, and transformers as a matrix of one row."""
    shared = None if family.experts is None else family.experts.shared
    return shared is not None and name.endswith(f".{shared.gate}.weight")


def llama_cpp_rows(checkpoint: Checkpoint, source: str, value: Tensor) -> Tensor:
    """A Hugging Face tensor as llama.cpp's files have it: rows of q and k of llama models with rotary pairs adjacent,
    weights of norms as they multiply."""
    config = checkpoint.config
    if is_shared_gate(checkpoint.family, source):
        return value[0]
    if offset := checkpoint.family.norm_offset_of(source):
        return value.float() + offset
    for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if checkpoint.family.gguf_permuted and f".{projection}." in source:
            return permute_rotary(value, heads)
    return value
