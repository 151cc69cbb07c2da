"""Sites: their names, which of them patterns match, and rules: which channels of a site's input are active while
decoding, and what stands in for the others."""

import difflib
import fnmatch
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sparsepack.errors import SiteError
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

SiteKey = tuple[int, str]
"""A site is named by the number of its decoder block and its name there."""


def site_name(layer: int, site: str) -> str:
    """`blk.LAYER.SITE`, the name of a site in lists, tables and artifacts."""
    return f"blk.{layer}.{site}"


def chosen_sites(
    sites: Sequence[SiteKey], include: Sequence[str], ignore: Sequence[str], called: str = "include"
) -> list[SiteKey]:
    """Those of a model's sites that `include` matches (all where it is empty) and `ignore` does not, in order of
    execution.

    called -- what the user calls `include`, for messages

    Raises `SiteError` for a pattern that matches nothing, or where no site is left.
    """
    names = {site_name(*key): key for key in sites}
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


CURVE_SHARES = (*(n / 20 for n in range(1, 20)), 0.975, 0.99)
"""A rule's curve holds thresholds for these shares of inactive channels, from 0 to 1."""


@dataclass(frozen=True)
class SiteRule:
    """A site's rule, the same record from the search for thresholds to the file and the kernels.

    Channel j is active where |x_j - offset_j| * c_j > t, strictly, compared in float32; an inactive one takes the value
    offset_j. With steps, of a format with planes, channel j is read at as many levels as have
    |x_j| * c_j > t * step. Experts that have an input each have thresholds each.

    threshold       -- t; in an artifact float32, a scalar, [columns] or [experts, columns], t with c divided out
    offset          -- float32 [columns]; None: zeros
    channel_weights -- c: float32 [columns] or [experts, columns]; None: ones
    steps           -- float32 [levels], never falling; None: a channel is read whole or not at all
    sparsity        -- target share of inactive channels, with levels of the bits that are not read
    realised        -- the share that the calibration text gave
    curve           -- the thresholds that give each share of `CURVE_SHARES` there; empty: not known
    row_costs       -- with levels, what a squared error of each of the site's outputs costs, for who quantises the
                       matrix: float32 [rows]; None: not known, or of experts, whose rows have no scales. Not kept in
                       artifacts
    """

    threshold: float | Tensor = 0.0
    offset: Tensor | None = None
    channel_weights: Tensor | None = None
    sparsity: float = 0.0
    realised: float = 0.0
    curve: tuple[float, ...] = ()
    row_costs: Tensor | None = None
    steps: Tensor | None = None

    @property
    def dense(self) -> bool:
        """Whether the rule skips no channel, ever. A threshold of zero with a target above zero skips exact zeros."""
        return not isinstance(self.threshold, Tensor) and not (self.threshold or self.sparsity) and self.offset is None

    def expected(self) -> float | None:
        """The share of inactive channels that the threshold gives on the calibration text, also where somebody has
        changed it; None where that is not known. From the curve, to about half a point."""
        if self.dense:
            return 0.0
        if self.of_levels:
            return self.realised
        if not self.curve or isinstance(self.threshold, Tensor):
            return None
        at = bisect_right(self.curve, self.threshold)
        if at == len(self.curve):
            return CURVE_SHARES[-1]
        (low, share), (high, next_share) = [(0.0, 0.0), *zip(self.curve, CURVE_SHARES, strict=True)][at : at + 2]
        found = share + (next_share - share) * (self.threshold - low) / (high - low)
        return self.realised if abs(found - self.realised) < 0.005 else found

    @cached_property
    def limits(self) -> Tensor:
        """What |x - offset| is compared with: float32, a scalar, [columns] or [(experts,) levels, columns]."""
        return self.unit if self.steps is None else self.steps[:, None] * self.unit[..., None, :]

    @cached_property
    def unit(self) -> Tensor:
        """The threshold with the channels' weights divided out: float32, a scalar, [columns] or [experts, columns]."""
        if isinstance(self.threshold, Tensor):
            return self.threshold
        threshold = torch.tensor(self.threshold, dtype=torch.float32)
        if self.channel_weights is None:
            return threshold
        # A channel whose weight is zero never matters: its threshold is infinite, also where t is zero.
        weights = self.channel_weights.float()
        return torch.where(weights > 0, threshold / weights, torch.inf)

    @property
    def of_levels(self) -> bool:
        """Whether it says at which level a channel is read, not only whether."""
        return self.steps is not None

    def to(self, device: torch.device | str) -> "SiteRule":
        """The rule as an artifact has it, on another device."""
        offset = None if self.offset is None else self.offset.to(device)
        steps = None if self.steps is None else self.steps.to(device)
        return replace(self, threshold=self.unit.to(device), offset=offset, channel_weights=None, steps=steps)


Rules = Mapping[SiteKey, SiteRule]
"""The rules of a model's sites; a site without one stays dense."""


def active_channels(x: Tensor, rule: SiteRule) -> Tensor:
    """Which channels of x [..., columns] are active: bool [..., columns], compared in float32."""
    shifted = x.float() if rule.offset is None else x.float() - rule.offset
    return shifted.abs() > rule.limits


def levels_read(x: Tensor, limits: Tensor) -> Tensor:
    """At which level each channel of x [..., columns] is read by limits [levels, columns], or [..., levels, columns] of
    each vector; 0: not at all. uint8 [..., columns]. NaN reads none."""
    size, (lowest, *higher) = x.float().abs(), limits.unbind(-2)
    levels = (size > lowest).to(torch.uint8)
    for limit in higher:
        levels += size > limit
    return levels


def sparsify(x: Tensor, rule: SiteRule) -> Tensor:
    """x [..., columns] with every inactive channel replaced by its offset: what the sparse product computes with."""
    rest = torch.zeros((), dtype=x.dtype, device=x.device) if rule.offset is None else rule.offset.to(x.dtype)
    return torch.where(active_channels(x, rule), x, rest)
