"""An opened zigzag GGUF: what its tensors are, and whether it can be run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsepack.formats.artifact import Program
from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.q4_k_fit import SUB
from sparsepack.formats.containers.gguf.container import GgufArtifact
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import StockModel, stock_config, stock_of
from sparsepack.formats.zigzag.layout import BASIS, RULE_VECTORS
from sparsepack.formats.zigzag.reader import ModelReader
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint
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
        if len(self.tensors[name].shape) != 3:
            return super().decoded(name, first, last)
        rows = self.logical_shape(name)[0]
        last = rows if last is None else min(last, rows)
        top = first // zigzag.BAND_ROWS
        blocks = self._blocks(name, top, zigzag.bands(last))
        top *= zigzag.BAND_ROWS
        return zigzag.unpack(blocks, min(rows - top, blocks.shape[0] * zigzag.BAND_ROWS))[first - top : last - top]

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
            rows = self.logical_shape(name)[0]
            if len(info.shape) != 3 or rows % zigzag.BAND_ROWS == 0:
                continue
            bands = info.shape[0]
            last = zigzag.unpack(self._blocks(name, bands - 1, bands), zigzag.BAND_ROWS).view(-1, SUB, info.shape[1])
            shared, held = divmod(rows % zigzag.BAND_ROWS, SUB)
            step = last[shared].amax(0).clamp_min(0) - last[shared].amin(0).clamp_max(0)
            step /= 10  # of 14 or 15 on the grid, to which dmin's rounding comes
            if last[shared + (held > 0) :].any() or (held and (last[shared, held:].abs() > step).any()):
                yield f"{self.path}: {name}: rows after the {rows} logical ones are not zero; pack it again"

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "runs it, skipping inactive columns while decoding")
        yield Program(
            "gguf-py, GGUF viewers", True, "show and dequantise each tensor; a site's rows lie in bands of 256"
        )
        yield Program("llama.cpp", False, "unknown model architecture 'sparsepack'; pack as q4_k for it")
        yield Program("transformers", False, "unknown architecture; sparsepack gives it the dequantised weights")
