"""The joules that a device takes, where the machine counts them: RAPL of Intel and AMD, NVML of NVIDIA."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class EnergyMeter:
    """Counters of energy, which only grow until they begin anew.

    how   -- what they count, in words
    read  -- the counters now
    joule -- what a joule is in their unit
    spans -- of each counter, the largest value, after which 0 comes; it is passed once at most within a measurement
    """

    how: str
    read: Callable[[], Sequence[int]]
    joule: float
    spans: Sequence[int]

    def joules(self, before: Sequence[int]) -> float:
        """The joules since `read` gave `before`, of all counters together."""
        of_each = zip(before, self.read(), self.spans, strict=True)
        return sum((now - then) % (span + 1) for then, now, span in of_each) / self.joule


def energy_meter(device: torch.device, root: Path = Path("/")) -> EnergyMeter | None:
    """What counts a device's energy; None where nothing does, or not for this user.

    root -- of the files /sys, where Linux has them for processors
    """
    return {"cpu": lambda: _processor(root), "cuda": lambda: _gpu(device)}.get(device.type, lambda: None)()


def _processor(root: Path) -> EnergyMeter | None:
    """The packages, each with its cores, caches and memory controllers. Only the superuser may read them on most
    systems, `chmod` lets others."""
    packages: dict[Path, int] = {}
    with suppress(OSError, ValueError):
        for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):  # AMD's have this name, too
            if (zone / "name").read_text().startswith("package"):
                int((zone / "energy_uj").read_text())
                packages[zone / "energy_uj"] = int((zone / "max_energy_range_uj").read_text())
        if packages:
            how = f"RAPL, {len(packages)} package{'s' * (len(packages) > 1)}"
            return EnergyMeter(how, lambda: [int(path.read_text()) for path in packages], 1e6, [*packages.values()])
    return None


def _gpu(device: torch.device) -> EnergyMeter | None:
    """The whole card."""
    with suppress(OSError, AttributeError, RuntimeError):
        nvml, handle, counter = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()

        def read() -> Sequence[int]:
            if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(counter)):
                raise RuntimeError("NVML does not tell the energy any more")
            return [counter.value]

        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0:
            read()
            return EnergyMeter("NVML, the GPU alone", read, 1e3, [2**64 - 1])
    return None
