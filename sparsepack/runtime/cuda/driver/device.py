"""The GPU that runs, and whether the cuda backend can run on it."""

import torch

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver.compiler import check_architecture, nvrtc_version
from sparsepack.runtime.cuda.driver.kernel import architecture


def usable(device: torch.device | str) -> torch.device:
    """The device with its number. Raises `UserError` where the backend cannot run on it, saying what is missing."""
    device = torch.device(device)
    if device.type != "cuda":
        raise UserError(
            f"device {device}: the cuda backend runs on NVIDIA GPUs; use device cuda or the reference backend"
        )
    if not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no CUDA device on this machine; use cpu")
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise UserError(f"device {device}: this machine has {count} CUDA devices; expected at most cuda:{count - 1}")
    check_architecture(architecture(index))
    _check_driver(nvrtc_version())
    return torch.device("cuda", index)


def _check_driver(nvrtc: str) -> None:
    """Raise `UserError` where the driver is of an older major version of CUDA than the machine code."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    if version // 1000 < int(nvrtc.partition(".")[0]):
        raise UserError(
            f"the GPU's driver knows CUDA {version // 1000}.{version % 1000 // 10}, and NVRTC is {nvrtc}: update the "
            "driver (CUDA 13 needs 580 or later), or install cuda-bindings and NVRTC of the driver's version"
        )
