"""How much sparsity each site gets: what every allocation takes, and the sites it may touch."""

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsepack.calibrate.criteria import CRITERIA
from sparsepack.errors import ThresholdsError
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.rule import SiteKey

ALLOCATIONS = ("uniform", "teal", "global")


@dataclass(frozen=True)
class AllocationOptions:
    """What the user asks for.

    sparsity   -- target share of weights that a decoded token skips, over the sites that may be sparse
    include    -- names or patterns of the sites that may be sparse (`blk.3.mlp_mid`, `blk.*.attn_in`, `re:...`)
    ignore     -- those that stay dense
    upstream   -- "sparse" or "dense" (the papers' way)
    windows    -- calibration windows that thresholds are taken on, of those in the calibration
    offsets    -- `global` also learns what inactive channels stand at, folded into a bias (R-Sparse's idea)
    steps, batch, length -- `global`: optimiser steps, windows per step, tokens per window
    """

    sparsity: float
    allocation: str = "uniform"
    criterion: str = "magnitude"
    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    upstream: str = "sparse"
    windows: int = 16
    offsets: bool = False
    steps: int = 300
    batch: int = 4
    length: int = 1024
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def check(self) -> None:
        """Raise `ThresholdsError` for values out of range."""
        if not 0 <= self.sparsity < 1:
            raise ThresholdsError(f"sparsity {self.sparsity}: expected at least 0 and below 1 (0.5 skips half)")
        for name, value, known in (
            ("allocation", self.allocation, ALLOCATIONS),
            ("criterion", self.criterion, CRITERIA),
            ("upstream", self.upstream, ("sparse", "dense")),
        ):
            if value not in known:
                raise ThresholdsError(f"{name} {value!r}: expected one of {', '.join(known)}")
        for name, count, least in (
            ("windows", self.windows, 1),
            ("steps", self.steps, 1),
            ("batch", self.batch, 1),
            ("length", self.length, 2),
        ):
            if count < least:
                raise ThresholdsError(f"{name} {count}: expected at least {least}")
        if self.offsets and self.allocation != "global":
            raise ThresholdsError("offsets are learnt from the model's output: they need --allocation global")
        if self.allocation == "global" and self.upstream == "dense":
            raise ThresholdsError("--allocation global runs the whole sparse model: it has no dense upstream")


def site_name(layer: int, site: str) -> str:
    """`blk.LAYER.SITE`, the name of a site in lists, tables and artifacts."""
    return f"blk.{layer}.{site}"


def sparse_sites(checkpoint: Checkpoint, include: Sequence[str], ignore: Sequence[str]) -> list[SiteKey]:
    """The sites that may be sparse, in order of execution. A pattern that matches nothing is a `ThresholdsError`."""
    names = {site_name(layer, site): (layer, site) for layer in range(checkpoint.layers) for site in SITES}
    wanted = set(names) if not include else {n for pattern in include for n in _matching(pattern, names, "include")}
    wanted -= {name for pattern in ignore for name in _matching(pattern, names, "ignore")}
    if not wanted:
        raise ThresholdsError("no site is left to be sparse; loosen the include and ignore lists")
    return [key for name, key in names.items() if name in wanted]


def _matching(pattern: str, names: Mapping[str, SiteKey], which: str) -> list[str]:
    if pattern.startswith("re:"):
        try:
            found = [name for name in names if re.fullmatch(pattern[3:], name)]
        except re.error as error:
            raise ThresholdsError(f"{which} {pattern!r}: not a regular expression ({error})") from error
    else:
        found = fnmatch.filter(names, pattern)
    if not found:
        near = difflib.get_close_matches(pattern.removeprefix("re:"), names, 5, cutoff=0.0)
        raise ThresholdsError(f"{which} {pattern!r} matches no site; nearest: {', '.join(near)}")
    return found


def weights_of(checkpoint: Checkpoint, sites: Sequence[SiteKey]) -> dict[SiteKey, float]:
    """Each site's share of the parameters of all `sites`: how much its sparsity counts."""
    sizes = {key: float(torch.Size(checkpoint.stacked_shape(key[1], key[0])).numel()) for key in sites}
    total = sum(sizes.values())
    return {key: size / total for key, size in sizes.items()}
