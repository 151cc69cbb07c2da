"""What the tests and the benchmark of every codec share: matrices of all kinds, the models', and their error."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def relative_error(found: Tensor, weights: Tensor) -> float:
    """Frobenius norm of the difference over that of the weights."""
    weights = weights.to(found.dtype)
    norm = torch.linalg.vector_norm
    return float(norm(found - weights, dtype=torch.float64) / norm(weights, dtype=torch.float64))


def synthetic() -> dict[str, Tensor]:
    """Matrices that a quantiser may find hard: float32 [64, 2048]."""
    generator = torch.Generator().manual_seed(20)
    shape = (64, 2048)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator)

    student = normal() / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()
    outliers = 0.02 * normal()
    outliers[:, ::512] *= 200
    return {
        "normal": normal(),
        "normal 1e-6": 1e-6 * normal(),
        "normal 1e-4": 1e-4 * normal(),
        "normal 1e6": 1e6 * normal(),
        "uniform": 2 * uniform() - 1,
        "student t 3": student,
        "cauchy": normal() / normal(),
        "positive": uniform() + 0.01,
        "exponential": -(1 - uniform()).log(),
        "around 1": 1 + 0.01 * normal(),
        "around -1": -1 + 0.01 * normal(),
        "around -1, close": -1 + 1e-4 * normal(),
        "constant": torch.full(shape, 0.37),
        "constant -": torch.full(shape, -0.37),
        "constant rows": torch.randn(64, 1, generator=generator).expand(shape).contiguous(),
        "ramp": torch.linspace(-1, 1, 64 * 2048).view(shape),
        "half zero": normal() * (uniform() < 0.5),
        "2 % nonzero": normal() * (uniform() < 0.02),
        "ternary": torch.randint(-1, 2, shape, generator=generator).float(),
        "outlier columns": outliers,
        "row scales": normal() * torch.exp(3 * torch.randn(64, 1, generator=generator)),
        "column scales": normal() * torch.exp(2 * torch.randn(1, 2048, generator=generator)),
    }


def model_matrices(model: Path, skip: str = "(?!)") -> Iterator[tuple[str, Tensor]]:
    """Every matrix of a checkpoint whose name does not contain the pattern `skip`, float32."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if re.search(skip, name):
                continue
            tensor = tensors.get_tensor(name)
            if tensor.dim() == 2:
                yield name, tensor.float()


def padded(weights: Tensor) -> Tensor:
    """Columns padded with zeros to a multiple of 256."""
    return torch.nn.functional.pad(weights, (0, -weights.shape[1] % 256))


def zigzag_order(weights: Tensor) -> Tensor:
    """The same weights with zigzag's superblocks in rows: [rows, columns] -> [bands * columns, 256]."""
    rows = padded(weights.t())  # [columns, bands * 256]
    return rows.view(weights.shape[1], -1, 256).transpose(0, 1).reshape(-1, 256)
