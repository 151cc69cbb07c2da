"""Names of sites, and which of a model's sites patterns of names match."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

from sparsepack.errors import SiteError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError


def site_name(layer: int, site: str) -> str:
    """`blk.LAYER.SITE`, the name of a site in lists, tables and artifacts."""
    return f"blk.{layer}.{site}"


def chosen_sites(
    checkpoint: Checkpoint, include: Sequence[str], ignore: Sequence[str], called: str = "include"
) -> list[SiteKey]:
    """The sites that `include` matches (all where it is empty) and `ignore` does not, in order of execution.

    called -- what the user calls `include`, for messages

    Raises `SiteError` for a pattern that matches nothing, or where no site is left.
    """
    names = {site_name(layer, site): (layer, site) for layer in range(checkpoint.layers) for site in SITES}
    wanted = set(names) if not include else {n for pattern in include for n in _matching(pattern, names, called)}
    wanted -= {name for pattern in ignore for name in _matching(pattern, names, "ignore")}
    if not wanted:
        raise SiteError("no site is left; loosen the include and ignore lists")
    return [key for name, key in names.items() if name in wanted]


def _matching(pattern: str, names: Mapping[str, SiteKey], which: str) -> list[str]:
    if pattern.startswith("re:"):
        try:
            matches, _ = SANDBOX.call("full_matches", pattern[3:], [*names])
            found = [str(name) for name in matches]
        except SandboxError as error:
            raise SiteError(f"{which} {pattern!r}: not a regular expression ({error})") from error
    else:
        found = fnmatch.filter(names, pattern)
    if not found:
        near = difflib.get_close_matches(pattern.removeprefix("re:")[:100], names, 5, cutoff=0.0)
        raise SiteError(f"{which} {pattern!r} matches no site; nearest: {', '.join(near)}")
    return found
