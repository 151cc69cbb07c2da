"""An opened zigzag GGUF: what its tensors are, and whether it can be run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.artifact import Program
from sparsepack.formats.blocks.q4_k import SUB
from sparsepack.formats.blocks.q6_p import GROUP
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.gguf import GgufArtifact
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import StockModel, stock_config, stock_of
from sparsepack.formats.zigzag.reader import (
    BASIS,
    CORRECTION,
    EXPERT_SCALE,
    ROUTER,
    ROUTER_BIAS,
    ROW_SCALE,
    RULE_VECTORS,
    SCALAR,
    SHARED_GATE,
    SINKS,
    TAIL,
    WEIGHT,
    XIELU_PARAMETERS,
    ModelReader,
    per_layer_sources,
)
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import HEAD, MLP_SITES
from sparsepack.models.sparse_attention import SparseAttention


@dataclass(frozen=True)
class ZigzagArtifact(GgufArtifact):
    """A zigzag GGUF."""

    reader: ClassVar[type[ModelReader]] = ModelReader

    @property
    def block(self) -> str:
        """The type of the superblocks."""
        return self.format.matrices.block

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
        return not name.endswith((*RULE_VECTORS, ROW_SCALE))

    def type_of_weights(self, name: str) -> str:
        return self.block if self._in_zigzag_order(name) else super().type_of_weights(name)

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        shape = self.tensors[name].shape
        of_experts = len(self.logical_shape(name)) == 3
        if not of_experts and not self._in_zigzag_order(name):
            return super().decoded(name, first, last)
        if of_experts:
            numbers = range(*slice(first, last).indices(shape[0]))
            return torch.stack([self._unpacked(name, self.stored(name, n, n + 1), shape[1:]) for n in numbers])
        rows = self.logical_shape(name)[0]
        last = rows if last is None else min(last, rows)
        if name.endswith(TAIL):
            weight = self._unpacked(name, self.stored(name), shape)[first:last]
        else:
            top, end = first // zigzag.BAND_ROWS, zigzag.bands(last)
            blocks = self.stored(name, top, end).view(end - top, shape[1], -1)
            top *= zigzag.BAND_ROWS
            held = min(rows - top, blocks.shape[0] * zigzag.BAND_ROWS)
            weight = zigzag.unpack(blocks, held, block=self.block)[first - top : last - top]
        of_rows = _matrix(name) + ROW_SCALE
        if of_rows not in self.tensors:
            return weight
        scales = self.stored(of_rows).view(torch.float32)
        start = first + (len(scales) - rows if name.endswith(TAIL) else 0)
        return weight * scales[start : start + len(weight)]

    def _in_zigzag_order(self, name: str) -> bool:
        return name.endswith(TAIL) or len(self.tensors[name].shape) > len(self.logical_shape(name))

    def _unpacked(self, name: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The logical weights of a matrix in zigzag order, or of one expert's, of that stored shape."""
        rows, columns = self.logical_shape(name)[-2:]
        blocks = stored.view(*shape[:-1], -1)
        if name.endswith(TAIL):
            return zigzag.unpack_tail(blocks, rows, columns, block=self.block)
        return zigzag.unpack(blocks, rows, block=self.block)

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        if name == "output_norm.weight":
            return checkpoint.norm(checkpoint.family.last_norm)
        if name == "output_norm.bias":
            return checkpoint.tensor(checkpoint.family.last_norm_bias)
        if name in ("token_embd.weight", "output.weight"):
            return checkpoint.tensor(HEAD if name == "output.weight" else checkpoint.family.embedding)
        if name in (outside := per_layer_sources(checkpoint.family)):
            return checkpoint.tensor(outside[name])
        block, layer, what, part = (*name.split("."), "", "", "")[:4]
        if block != "blk" or not layer.isdecimal() or int(layer) >= checkpoint.layers:
            return None
        family = checkpoint.family_at(int(layer))
        if what in family.norms and part == "bias":
            return checkpoint.tensor(f"model.layers.{layer}.{family.norms[what]}.bias")
        if what in family.norms:
            return checkpoint.norm(f"model.layers.{layer}.{family.norms[what]}.weight")
        if family.state is not None and what in family.state.tensors:
            found = checkpoint.tensor(f"model.layers.{layer}.{family.state.tensors[what]}")
            return found.flatten(1) if found.dim() > 1 else found
        if f"{what}.{part}" == BASIS and int(layer) in checkpoint.bases:
            return checkpoint.tensor(checkpoint.family.basis(int(layer)))
        experts = family.experts
        if f"{what}.{part}" == CORRECTION and experts is not None and experts.routing is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.routing.correction}")
        if f"{what}.{part}" == ROUTER and experts is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.router}.weight")
        if f"{what}.{part}" == EXPERT_SCALE and experts is not None and experts.own_norms is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.own_norms.experts}")
        if f"{what}.{part}" == ROUTER_BIAS and experts is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.router}.bias")
        if f"{what}.{part}" == XIELU_PARAMETERS and checkpoint.family.activation_parameters:
            return checkpoint.activation_parameters(int(layer))
        vectors = {SINKS: checkpoint.family.sinks, SCALAR: checkpoint.family.layer_scalar}
        if source := per_layer_sources(checkpoint.family, int(layer)).get(f"{what}.{part}"):
            return checkpoint.tensor(source)
        if vector := vectors.get(f"{what}.{part}"):
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{vector}")
        if f"{what}.{part}" == SHARED_GATE and experts is not None and experts.shared is not None:
            return checkpoint.tensor(f"{checkpoint.family.block(layer)}.{experts.shared.gate}.weight")
        if experts is not None and what in MLP_SITES:
            bias = checkpoint.stacked_bias(int(layer), what) if part == "bias" else None
            return bias if part == "bias" else self.part_of(name, checkpoint.experts(int(layer), what))
        if what in family.projections:
            weight, bias = checkpoint.stacked(int(layer), what)
            return bias if part == "bias" else self.part_of(name, weight)
        return None

    def part_of(self, name: str, weight: Tensor) -> Tensor:
        """The rows that a tensor holds of a matrix in zigzag order, or of each expert's: [..., rows, columns]. All of
        them where its tensors have not as many together: it is another model's."""
        matrix = _matrix(name)
        held = [self.logical_shape(matrix + end)[-2] if matrix + end in self.tensors else 0 for end in (WEIGHT, TAIL)]
        if sum(held) != weight.shape[-2]:
            return weight
        return weight[..., held[0] :, :] if name.endswith(TAIL) else weight[..., : held[0], :]

    def padding_problems(self) -> Iterator[str]:
        """Matrices whose rows after the logical ones do not decode to zero, and tails that no engine runs.

        Zeros that share a sub-block of 32 with real rows are quantised with them: they may be off by a step of its
        grid.
        """
        for name in filter(self._in_zigzag_order, self.tensors):
            rows, columns = self.logical_shape(name)[-2:]
            if name.endswith(TAIL):
                found = (_tail_problem(self.block, rows, columns, tail) for tail in self._last_blocks(name))
            elif rows % zigzag.BAND_ROWS:
                found = (_band_problem(self.block, rows, band) for band in self._last_blocks(name))
            else:
                continue
            if problem := next(filter(None, found), ""):
                yield f"{self.path}: {name}: {problem}; pack it again"

    def _last_blocks(self, name: str) -> Iterator[Tensor]:
        """The last band of a matrix, or its tail; or that of each expert's: uint8 [columns or superblocks, bytes]."""
        shape, of_experts = self.tensors[name].shape, len(self.logical_shape(name)) == 3
        count = 1 if name.endswith(TAIL) else shape[-3]
        if not of_experts:
            stored = self.stored(name) if name.endswith(TAIL) else self.stored(name, count - 1, count)
            yield stored.view(shape[-2], -1)
        for expert in range(shape[0]) if of_experts else ():
            yield self.stored(name, expert, expert + 1).view(count, shape[-2], -1)[-1]

    def programs(self) -> Iterator[Program]:
        if BLOCKS[self.block].levels:
            yield Program("sparsepack", True, "runs it, reading bits of a column by how large its input is")
            what = f"show the bytes of each site's {self.block}, and dequantise the other tensors"
        else:
            yield Program("sparsepack", True, "runs it, skipping inactive columns while decoding")
            what = "show and dequantise each tensor; a site's rows lie in bands of 256, the last in pieces of 64, "
            what += "before they are multiplied by its row_scale"
        yield Program("gguf-py, GGUF viewers", True, what)
        yield Program("llama.cpp", False, "unknown model architecture 'sparsepack'; pack as q4_k for it")
        yield Program("transformers", False, "unknown architecture; sparsepack gives it the dequantised weights")


def _matrix(name: str) -> str:
    """The name of a matrix in zigzag order, of whose tensors this is one's."""
    return name.removesuffix(TAIL if name.endswith(TAIL) else WEIGHT)


def _tail_problem(block: str, rows: int, columns: int, tail: Tensor) -> str:
    """What is wrong with a tail, uint8 [superblocks, bytes], of so many logical rows; empty: nothing."""
    try:
        zigzag.check_steps(tail, rows, columns, block)
    except PackingError:
        return "d or dmin differ within a column of the tail"
    pieces = BLOCKS[block].decode(tail).view(-1, zigzag.PIECE_ROWS)
    used = columns * zigzag.tail_pieces(rows)
    if pieces[used:].any():
        return "pieces after the last column are not zero"
    return rows_problem(block, rows, rows, pieces[:used].view(columns, -1).t())


def _band_problem(block: str, rows: int, band: Tensor) -> str:
    """What is wrong with the last band, uint8 [columns, bytes], of so many logical rows; empty: nothing."""
    return rows_problem(block, rows, rows % zigzag.BAND_ROWS, BLOCKS[block].decode(band).t())


def rows_problem(block: str, rows: int, held: int, weights: Tensor) -> str:
    """What is wrong with float32 [whole sub-blocks of rows, columns], the last of so many logical rows, which has
    `held` of them; empty: what follows these is zero."""
    sub = GROUP if BLOCKS[block].levels else SUB
    last = weights.reshape(-1, sub, weights.shape[1])
    shared, held = divmod(held, sub)
    wrong = bool(last[shared + (held > 0) :].any())
    if held:
        step = last[shared].amax(0).clamp_min(0) - last[shared].amin(0).clamp_max(0)
        step /= 10  # of 14 or 15 on the grid, to which dmin's rounding comes
        wrong |= bool((last[shared, held:].abs() > step).any())
    return f"rows after the {rows} logical ones are not zero" if wrong else ""
