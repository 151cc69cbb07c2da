"""The bandwidth profile of a GPU and the processor with it: how fast each reads its memories and computes neurons,
measured once by `sparsepack tune`, then remembered: a file for each machine, number of threads and width of records."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

import torch

from sparsepack.files.atomic import write_json
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cpu.machine import cpu_info, instruction_set
from sparsepack.runtime.cpu.operations import worker_threads
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.hybrid.measure_bandwidth import MeasuredBandwidth, measure_card
from sparsepack.runtime.tuning import check_capacity, tuning_path

SCHEMA = 5


def profile_path(of: Mapping[str, Any]) -> Path:
    """The file that keeps a bandwidth profile. of -- what it depends on: the machine, threads, width."""
    return tuning_path("links", SCHEMA, *of.values())


def write_profile(of: Mapping[str, Any], measured: MeasuredBandwidth) -> dict[str, Any]:
    """Keep what was measured; returns it as JSON-able values, with its `path`. Raises `OutputError`."""
    path = profile_path(of)
    content = {"schema": SCHEMA, **of, **asdict(measured)}
    write_json(path, content)
    return {**content, "path": str(path)}


def read_profile(of: Mapping[str, Any]) -> BandwidthProfile | None:
    """What was measured. A file that is missing, damaged, of another schema or of another machine holds nothing."""
    try:
        content = json.loads(profile_path(of).read_text())
        bandwidth = BandwidthProfile(
            **{field.name: float(content["together"][field.name]) for field in fields(BandwidthProfile)}
        )
        known = {key: content[key] for key in ("schema", *of)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    speeds = astuple(bandwidth)
    return bandwidth if known == {"schema": SCHEMA, **of} and all(0 < each < math.inf for each in speeds) else None


def load_profile(
    threads: int | None, hidden: int, device: torch.device, kernels: Kernels = KERNELS
) -> BandwidthProfile | None:
    """Return the bandwidth profile measured on this machine with this GPU; None where `sparsepack tune` never saw
    records of this width, or so many threads beside the GPU (None: all that there are)."""
    return read_profile(depends_on(threads, hidden, device, kernels))


def measure(
    widths: Iterable[int], device: torch.device, threads: int | None, kernels: Kernels = KERNELS
) -> list[dict[str, Any]]:
    """Measure the bandwidth profile for records of each width, keep it, and return it JSON-able.

    Raises `UserError` without kernels, or where other work hides a figure, and `OutputError` where it cannot be kept,
    before anything is measured.
    """
    device = kernels.usable(device)
    by_path = {profile_path(of): of for of in (depends_on(threads, hidden, device, kernels) for hidden in widths)}
    for path in by_path:
        check_capacity(path, 1)
    return [write_profile(of, measure_card(kernels, device, of["threads"], of["hidden"])) for of in by_path.values()]


def depends_on(threads: int | None, hidden: int, device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """What a bandwidth profile depends on; each has a file of its own. Threads are those of the worker."""
    most = worker_threads()
    return {
        "cpu_info": cpu_info(),
        "instruction_set": instruction_set(),
        "gpu_info": kernels.device_name(device),
        "threads": min(threads or most, most),
        "hidden": hidden,
    }
