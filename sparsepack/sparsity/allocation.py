"""The sites that an allocation may touch, and how much each of them counts."""

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence

import torch

from sparsepack.errors import ThresholdsError
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.rule import SiteKey


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
