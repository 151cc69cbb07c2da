"""An opened zigzag GGUF: what its tensors are, and whether it can be run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsepack.formats.artifact import Program
from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.q4_k_fit import SUB
from sparsepack.formats.containers.gguf.container import GgufArtifact
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import StockModel, stock_config, stock_of
from sparsepack.formats.zigzag.layout import BASIS, ROUTER, RULE_VECTORS, SHARED_GATE
from sparsepack.formats.zigzag.reader import ModelReader
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint
from sparsepack.models.family import MLP_SITES
from sparsepack.models.records.sparse_attention import SparseAttention

_OUTSIDE = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}


@dataclass(frozen=True)
class ZigzagArtifact(GgufArtifact):
    """A zigzag GGUF."""

    reader: ClassVar[type[ModelReader]] = ModelReader

    def packed(self) -> PackedModel:
        return self.reader(self.file, self.manifest).model()

    def stock(self) -> StockModel:
        return stock_of(self.packed())

    def attention(self) -> SparseAttention | None:
        return self.packed().attention

    def bases(self) -> Mapping[int, str]:
        names = {layer: f"blk.{layer}.{BASIS}" for layer in range(len(self.tensors))}
        return {layer: name for layer, name in names.items() if name in self.tensors}

    def check_shapes(self) -> None:
        stock_config(self.packed())

    def holds_weights(self, name: str) -> bool:
        return not name.endswith(RULE_VECTORS)

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        dimensions = len(self.tensors[name].shape)
        if dimensions < 3:
            return super().decoded(name, first, last)
        if dimensions == 4:
            numbers = range(*slice(first, last).indices(self.tensors[name].shape[0]))
            return torch.stack([self._expert(name, number) for number in numbers])
        rows = self.logical_shape(name)[0]
        last = rows if last is None else min(last, rows)
        top = first // zigzag.BAND_ROWS
        blocks = self._blocks(name, top, zigzag.bands(last))
        top *= zigzag.BAND_ROWS
        return zigzag.unpack(blocks, min(rows - top, blocks.shape[0] * zigzag.BAND_ROWS))[first - top : last - top]

    def _expert(self, name: str, number: int) -> Tensor:
        """The logical weights of one expert: float32 [rows, columns]."""
        _, bands, columns, _ = self.tensors[name].shape
        return zigzag.unpack(
            self.stored(name, number, number + 1).view(bands, columns, -1), self.logical_shape(name)[1]
        )

    def _blocks(self, name: str, first: int, last: int) -> Tensor:
        """The bands [first, last): uint8 [bands, columns, 144]."""
        return self.stored(name, first, last).view(last - first, self.tensors[name].shape[1], -1)

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        if name in _OUTSIDE:
            source = _OUTSIDE[name]
            return checkpoint.norm(source) if source == FINAL_NORM else checkpoint.tensor(source)
        block, layer, what, part = (*name.split("."), "", "", "")[:4]
        if block != "blk" or not layer.isdecimal() or int(layer) >= checkpoint.layers:
            return None
        if what in checkpoint.family.norms:
            return checkpoint.norm(f"model.layers.{layer}.{checkpoint.family.norms[what]}.weight")
        if f"{what}.{part}" == BASIS and int(layer) in checkpoint.bases:
            return checkpoint.tensor(checkpoint.family.basis(int(layer)))
        experts = checkpoint.family.experts
        if f"{what}.{part}" == ROUTER and experts is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.router}.weight")
        if f"{what}.{part}" == SHARED_GATE and experts is not None and experts.shared is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.shared.gate}.weight")
        if experts is not None and what in MLP_SITES:
            return checkpoint.experts(int(layer), what) if part == "weight" else None
        if what in checkpoint.family.projections:
            weight, bias = checkpoint.stacked(int(layer), what)
            return bias if part == "bias" else weight
        return None

    def padding_problems(self) -> Iterator[str]:
        """Matrices whose rows after the logical ones do not decode to zero.

        Zeros that share a sub-block of 32 with real rows are quantised with them: they may be off by a step of its
        grid.
        """
        for name, info in self.tensors.items():
            if len(info.shape) < 3:
                continue
            rows = self.logical_shape(name)[-2]
            if rows % zigzag.BAND_ROWS and any(_rows_after(rows, blocks) for blocks in self._last_bands(name)):
                yield f"{self.path}: {name}: rows after the {rows} logical ones are not zero; pack it again"

    def _last_bands(self, name: str) -> Iterator[Tensor]:
        """The last band of a matrix, or of each expert's: uint8 [1, columns, 144]."""
        *experts, bands, columns, _ = self.tensors[name].shape
        if not experts:
            yield self._blocks(name, bands - 1, bands)
        for expert in range(*experts) if experts else ():
            yield self.stored(name, expert, expert + 1).view(bands, columns, -1)[-1:]

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "runs it, skipping inactive columns while decoding")
        yield Program(
            "gguf-py, GGUF viewers", True, "show and dequantise each tensor; a site's rows lie in bands of 256"
        )
        yield Program("llama.cpp", False, "unknown model architecture 'sparsepack'; pack as q4_k for it")
        yield Program("transformers", False, "unknown architecture; sparsepack gives it the dequantised weights")


def _rows_after(rows: int, blocks: Tensor) -> bool:
    """Whether a last band, of a matrix of so many logical rows, holds anything after them: uint8 [1, columns, 144]."""
    last = zigzag.unpack(blocks, zigzag.BAND_ROWS).view(-1, SUB, blocks.shape[1])
    shared, held = divmod(rows % zigzag.BAND_ROWS, SUB)
    step = last[shared].amax(0).clamp_min(0) - last[shared].amin(0).clamp_max(0)
    step /= 10  # of 14 or 15 on the grid, to which dmin's rounding comes
    return bool(last[shared + (held > 0) :].any() or (held and (last[shared, held:].abs() > step).any()))
