"""The Linears that transformers has in place of those that a folder stores in a format of ours."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsepack.formats.orders.planes import PIECE_BYTES, pieces
from sparsepack.formats.orders.slide import STEPS, Slide
from sparsepack.formats.planes import LEVELS
from sparsepack.formats.slide import value_type
from sparsepack.formats.table import Format
from sparsepack.runtime import planes_operator
from sparsepack.runtime.planes_operator import PlanesMatrix, Prepared, planes_linear
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import dense_type, prepare, sparse24_linear


class FolderLinear(nn.Module):
    """y = x W^T + bias, with W as it lies in a folder. What else its products need is prepared when the first inputs
    come, and again once the weights lie elsewhere."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, columns: int, rows: int, bias: bool, of: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = columns, rows
        self.bias = _parameter(rows, dtype=of, device=device) if bias else None
        self._prepared_for: Any = None

    @abstractmethod
    def in_words(self, linears: Sequence["FolderLinear"], dtype: torch.dtype) -> str:
        """What is said when a model with these Linears is loaded, itself one of them; empty: nothing."""

    @abstractmethod
    def _make(self, dtype: torch.dtype) -> None:
        """Prepare products with inputs of a type."""

    def _forget(self) -> None:
        """Drop what was prepared."""
        self._prepared_for = None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Weights and scales move, but are never cast: their types are the format's."""
        self._forget()

        def moved(t: Tensor) -> Tensor:
            found: Tensor = fn(t) if t is self.bias else fn(t.view(torch.uint8)).view(t.dtype)
            return found

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *given: Any, **settings: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*given, **settings)

    def __getstate__(self) -> dict[str, Any]:
        # A copy's weights lie elsewhere.
        return {**self.__dict__, **self._unprepared()}

    @abstractmethod
    def _unprepared(self) -> dict[str, Any]:
        """The attributes of a Linear for which nothing was prepared."""

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"inputs {list(x.shape)}; expected [..., {self.in_features}]")
        self._prepare(x.dtype, x.device)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _prepare(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Compilers call it while they compile; from then on they watch what was prepared. Raises `ValueError` for
        another device."""
        # Not self.weight: modules find that in Python, four times as slowly, and this is done for every token.
        weights = [of for of in self._parameters.values() if of is not None]
        lies = (dtype, device, *(weight.data_ptr() for weight in weights))
        if self._prepared_for != lies:
            if device != weights[-1].device:
                raise ValueError(f"inputs on {device}, weights on {weights[-1].device}; move one of them")
            self._forget()  # its memory is free before more is taken
            self._make(dtype)
            self._prepared_for = lies
        return True


class Sparse24Linear(FolderLinear):
    """The Linear of a slid folder (`formats.slide`).

    weight           -- the sparse24 values: int8, float8_e4m3fn or bfloat16 [rows, stored]
    weight_positions -- uint8 [rows, stored / 4 rounded up]
    weight_scale     -- float32 [rows]; None for bfloat16
    bias             -- [rows], or None

    Inputs [..., columns] are quantised token by token to the values' type, outputs have the inputs' type. See
    `runtime.sparse24_operator`, which computes it and has no gradients.
    """

    _prepared: list[Tensor]
    _matrix: Sparse24Matrix | None

    def __init__(
        self, columns: int, rows: int, how: Slide, dtype: torch.dtype, bias: bool, of: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(columns, rows, bias, of, device)
        self.how, stored = how, how.stored(columns)
        self.weight = _parameter(rows, stored, dtype=dtype, device=device)
        self.weight_positions = _parameter(rows, -(-stored // 4), dtype=torch.uint8, device=device)
        self.weight_scale = _parameter(rows, dtype=torch.float32, device=device) if dtype in STEPS else None
        self._forget()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.how.pattern}, {self.weight.dtype}"

    def in_words(self, linears: Sequence[FolderLinear], dtype: torch.dtype) -> str:
        if (device := self.weight.device.type) not in ("cpu", "mps"):
            return ""
        of_dense = dense_type(self.matrix, dtype)
        taken = sum(of.in_features * of.out_features for of in linears) * of_dense.itemsize
        return (
            f"on {device} its {len(linears)} slid Linears are multiplied with their zeros, in "
            f"{str(of_dense).removeprefix('torch.')}: {taken / 1e9:.2f} GB more from the first product on"
        )

    @property
    def matrix(self) -> Sparse24Matrix:
        """The weights as the operations take them."""
        return Sparse24Matrix(self.weight, self.weight_positions, self.weight_scale, self.how, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        assert self._matrix is not None
        return sparse24_linear(x, self._matrix, self.bias, self._prepared)

    def _make(self, dtype: torch.dtype) -> None:
        self._matrix = self.matrix
        self._prepared = prepare(self._matrix, dtype)

    def _forget(self) -> None:
        super()._forget()
        self._prepared, self._matrix = [], None

    def _unprepared(self) -> dict[str, Any]:
        return {"_prepared_for": None, "_prepared": [], "_matrix": None}


class PlanesLinear(FolderLinear):
    """The Linear of a folder of planes (`formats.planes`).

    weight           -- uint8 [pieces, columns, 50]
    weight_scale     -- float32 [rows]
    weight_threshold -- float32 [columns]
    weight_steps     -- float32 [levels]
    bias             -- [rows], or None

    Inputs of one position, [..., 1, columns] or [columns], are of tokens that are decoded: a column is read at the
    level of its input. Of more positions all planes are read. See `runtime.planes_operator`, which computes it and has
    no gradients.
    """

    _matrix: PlanesMatrix | None

    def __init__(self, columns: int, rows: int, bias: bool, of: torch.dtype, device: torch.device) -> None:
        super().__init__(columns, rows, bias, of, device)
        self.weight = _parameter(pieces(rows), columns, PIECE_BYTES, dtype=torch.uint8, device=device)
        self.weight_scale = _parameter(rows, dtype=torch.float32, device=device)
        self.weight_threshold = _parameter(columns, dtype=torch.float32, device=device)
        self.weight_steps = _parameter(len(LEVELS), dtype=torch.float32, device=device)
        self._forget()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, planes of {', '.join(map(str, LEVELS))} bits"

    def in_words(self, linears: Sequence[FolderLinear], dtype: torch.dtype) -> str:
        device = self.weight.device.type
        if device == "cpu" and planes_operator.has_kernels():
            taken = sum(of.weight.nbytes for of in linears)
            return (
                f"its {len(linears)} Linears in planes are copied for the CPU's kernels: {taken / 1e9:.2f} GB more "
                "from the first product on"
            )
        return (
            f"no kernels for its {len(linears)} Linears in planes on {device}: they are unpacked for every token, "
            "which is slow"
        )

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        assert self._matrix is not None
        decode = x.dim() == 1 or x.shape[-2] == 1
        return planes_linear(x, self._matrix, self.bias, self._prepared.tensors, decode)

    def _make(self, dtype: torch.dtype) -> None:
        self._matrix = PlanesMatrix(self.weight, self.weight_scale, self.weight_threshold, self.weight_steps)
        self._prepared = planes_operator.prepare(self._matrix)

    def _forget(self) -> None:
        super()._forget()
        self._prepared, self._matrix = Prepared(), None

    def _unprepared(self) -> dict[str, Any]:
        return {"_prepared_for": None, "_prepared": Prepared(), "_matrix": None}


def linear_of(format: Format, linear: nn.Linear, how: Any) -> FolderLinear:
    """What stands in the place of a Linear: of the same shape, bias and device, without weights yet.

    how -- how it is stored, as `linear_folder.configured_linears` says
    """
    columns, rows, bias = linear.in_features, linear.out_features, linear.bias is not None
    dtype, device = linear.weight.dtype, linear.weight.device
    if format.weight_sparsity:
        return Sparse24Linear(columns, rows, how, value_type(format).dtype, bias, dtype, device)
    return PlanesLinear(columns, rows, bias, dtype, device)


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
