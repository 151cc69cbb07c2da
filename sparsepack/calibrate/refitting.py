"""The pass over a model: block by block and site by site, in order of execution.

The second half of every window is sparse, the first half dense. All matrices upstream of a site are by then what will
be stored, refitted and quantised: a block is run once, and at each of its sites the run waits until the inputs there
are counted and the matrix is replaced. Where not all windows go through at once, the block is run once per site, the
run cut short there, as for thresholds (`sequential`). After each block its encoded matrices and the hidden
states are kept; a run that was killed goes on from there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.refit_inputs import ExpertSums, FittedSite, SiteSums, refitted
from sparsepack.calibrate.sequential import inputs_of_site, sparse_second_half, sparsify_second_half
from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.errors import PackingError, SingularError
from sparsepack.files.hashing import NO_HASH, fingerprint
from sparsepack.files.tensors import arithmetic
from sparsepack.files.transfer import stacked_on
from sparsepack.formats.plan import Encoded, EncodedSite, SiteEncoder, naming
from sparsepack.formats.table import Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.family import MLP_SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.forecast import bound_line
from sparsepack.models.hf_model.hooks import routing_hooks, site_hooks
from sparsepack.models.sites import Rules, site_name
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import Shorter
from sparsepack.reconstruction import Inputs
from sparsepack.version import __version__
from sparsepack.workers.shard import Shard

LENGTH = 512
"""Error feedback runs so many tokens of a window: of as many tokens more is learnt from more texts."""
TOKENS_OF_INPUT = 3
"""Unless told otherwise it has so many tokens for each input of the widest site."""
MORE_WINDOWS = 128
"""Unless told otherwise so many windows at least are run on a GPU, and of full length for a refit."""
AT_ONCE = {"cpu": 8192, "cuda": 65_536}
"""Tokens that are run at a time; on other devices as on a CPU."""
SHRINKAGE, ENOUGH = 1.0, 8
"""Error feedback damps the products of inputs by this share of each input's own moment, and by more where there are
fewer than `ENOUGH` tokens for each input: with less, other text than the calibration's loses more at some sites than by
rounding to nearest."""


@dataclass(frozen=True)
class Refit:
    """What the pass made.

    section -- the manifest's: what was asked, and of each site how its weights changed and how far its outputs are off
    encoded -- the matrices that it made; empty while they are still to come
    """

    section: Mapping[str, Any]
    encoded: Encoded


def refit_model(
    checkpoint: Checkpoint,
    calibration: Calibration,
    sites: tuple[str, ...],
    encode: SiteEncoder,
    thresholds: Thresholds | None,
    options: RefitOptions,
    format: str,
    shard: Shard,
) -> Refit:
    """Fit and quantise the matrices of a model's sites.

    sites  -- those that are fitted (`fitted_sites`)
    encode -- as the artifact will have them
    format -- all that decides how a site is encoded
    shard  -- whose folder has the state of the run that makes the artifact: that of this pass, in a folder of its own
              there, keeps the matrices until the artifact is written

    Raises `PackingError` for a site whose products have no inverse or whose weights cannot be encoded, and
    `OutputError` where the disk refuses the state.
    """
    asked = {
        "sparsepack": __version__,
        "model": checkpoint.sha256,
        "calibration": calibration.sha256,
        "format": format,
        "thresholds": thresholds.to_json() if thresholds else None,
        "options": asdict(options),
    }
    shard = shard.resume(fingerprint(asked), checkpoint.layers, within="refit")
    rules = thresholds.rules if thresholds else {}
    count, length = fitting_windows(checkpoint, options, calibration.windows.shape)
    windows = spread_windows(calibration.windows, count)[:, :length]
    with torch.no_grad():
        _run(checkpoint, windows, sites, encode, rules, options, shard)
    encoded = {
        name: partial(_kept, shard, layer, site, name) for layer, site, names in shard.value("names") for name in names
    }
    return Refit(_section(calibration.sha256, options, len(windows), shard.value("sites")), encoded)


def predicted_refit(checkpoint: Checkpoint, format: Format, options: RefitOptions) -> Refit:
    """What will be known of the pass, in as much room, before it is run. Raises `CheckpointError` for a refit of a
    model with experts."""
    typical = 0.12346
    sites = [
        {"site": site_name(layer, site), **_row({f"{site_name(layer, site)}.weight": typical}, typical, typical)}
        for layer in range(checkpoint.layers)
        for site in fitted_sites(checkpoint, format, options)
    ]
    return Refit(_section(NO_HASH, options, options.refit_windows or MORE_WINDOWS, sites), {})


def fitted_sites(checkpoint: Checkpoint, format: Format, options: RefitOptions) -> tuple[str, ...]:
    """The sites whose matrices are fitted: all, but for experts where the format has them rounded to nearest.

    Raises `CheckpointError` for a refit of a model with experts.
    """
    if options.refit:
        check_taken("refit", checkpoint.family, checkpoint.name)
    rounded = MLP_SITES if checkpoint.family.experts is not None and not format.fits_experts else ()
    return tuple(site for site in checkpoint.family.projections if site not in rounded)


def fitting_windows(
    checkpoint: Checkpoint, options: RefitOptions, windows: tuple[int, int] | torch.Size
) -> tuple[int, int]:
    """How many windows weights are fitted on, and how many tokens of each, of a calibration with `windows` [N, S]."""
    length = windows[1] if options.refit else min(windows[1], LENGTH)
    count = options.refit_windows
    if count is None:
        widest = max(checkpoint.stacked_shape(site, layer)[1] for layer, site in checkpoint.sites)
        more = options.refit or torch.device(options.device).type == "cuda"
        count = max(-(-TOKENS_OF_INPUT * widest // length), MORE_WINDOWS if more else 1)
    return min(count, windows[0]), length


def check_tokens(checkpoint: Checkpoint, windows: tuple[int, int], options: RefitOptions) -> None:
    """Raise `PackingError` where weights are refitted, on fewer tokens than the widest site has inputs: only the second
    halves of windows tell of sparse ones. Error feedback alone does with any number: the fewer, the more `SHRINKAGE`.

    windows -- how many the calibration has, and of how many tokens each
    """
    if not options.refit:
        return
    count, length = fitting_windows(checkpoint, options, windows)
    columns, site = max((checkpoint.stacked_shape(site, layer)[1], site) for layer, site in checkpoint.sites)
    needed = -(-columns // (length - length // 2))
    if count < needed:
        where = "calibrate's --samples" if count == windows[0] else "--refit-windows"
        raise PackingError(
            f"{count} calibration windows of {length} tokens: too few to fit weights to the {columns} inputs of "
            f"{site}; expected {needed} windows, by {where}"
        )


def _run(
    checkpoint: Checkpoint,
    windows: Tensor,
    sites: tuple[str, ...],
    encode: SiteEncoder,
    rules: Rules,
    options: RefitOptions,
    shard: Shard,
) -> None:
    """Fit the blocks that are not finished; the state has all of them then. windows: int64 [N, S]"""
    stream = BlockStream(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))
    hidden = stream.states(windows, shard.hidden())
    batch = max(AT_ONCE.get(stream.device.type, AT_ONCE["cpu"]) // windows.shape[1], 1)
    fitting = _BlockFitting(checkpoint, stream, encode, rules, options, shard)
    batches = torch.split(hidden, batch)
    steps = len(sites) if len(batches) == 1 else (len(sites) + 1) * len(batches)
    shorter = Shorter("--refit-windows", len(hidden))
    with shard.blocks("fitting weights", steps, steps, shorter, partial(bound_line, stream)) as (unfinished, advance):
        for layer in unfinished:
            stream.load(layer)
            if len(batches) == 1:
                fitting.run_once(layer, sites, hidden, advance)
            else:
                fitting.run_each(layer, sites, batches, advance)
                with sparse_second_half(stream, layer, rules):
                    stream.pass_on(hidden, batch, advance)
            shard.save_block(layer, {}, hidden, names=fitting.names, sites=fitting.rows)


class _BlockFitting:
    """Replaces the matrices of the loaded block; what becomes of them is kept in the state.

    names -- of each site that is fitted [layer, site, names of its tensors]
    rows  -- of each, the manifest's numbers
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stream: BlockStream,
        encode: SiteEncoder,
        rules: Rules,
        options: RefitOptions,
        shard: Shard,
    ) -> None:
        self.checkpoint, self.stream, self.encode = checkpoint, stream, encode
        self.rules, self.options, self.shard = rules, options, shard
        self.names, self.rows = shard.value("names", []), shard.value("sites", [])
        self.dense = options.refit_dense if any(not rule.dense for rule in rules.values()) else None
        self.routed: list[Tensor] = []  # the experts of the running pass's tokens

    def run_once(self, layer: int, sites: tuple[str, ...], hidden: Tensor, advance: Callable[[], object]) -> None:
        """Run all windows through the block, each site fitted when its inputs come."""

        def function(_: int, site: str, x: Tensor) -> Tensor | None:
            if site in sites:
                sums = self._begin(layer, site)
                sums.add(x)
                self._replace(layer, site, sums)
                advance()
            return sparsify_second_half(x, self.rules.get((layer, site)))

        with site_hooks([(layer, self.stream.block)], self.checkpoint.family, function), self._routing():
            self.stream.pass_on(hidden, len(hidden), lambda: None)

    def run_each(
        self, layer: int, sites: tuple[str, ...], batches: Sequence[Tensor], advance: Callable[[], object]
    ) -> None:
        """Run batches of windows up to each site in turn."""
        for site in sites:
            sums = self._begin(layer, site)

            def count(x: Tensor, into: SiteSums | ExpertSums = sums) -> None:
                into.add(x)
                advance()

            with self._routing():
                inputs_of_site(self.stream, (layer, site), batches, self.rules, count)
            self._replace(layer, site, sums)

    def _routing(self) -> AbstractContextManager[None]:
        def route(chosen: Tensor) -> None:
            self.routed[:] = [chosen]

        return routing_hooks(self.stream.block, self.checkpoint.family, route)

    def _begin(self, layer: int, site: str) -> SiteSums | ExpertSums:
        rule, device = self.rules.get((layer, site)), self.options.device
        if self.checkpoint.family.of_experts(layer, site):
            return ExpertSums(self.checkpoint, layer, site, rule, self.routed, device)
        weight = stacked_on(device, self.checkpoint.projections(layer, site)).float()
        return SiteSums(weight, rule, self.dense)

    def _replace(self, layer: int, site: str, sums: SiteSums | ExpertSums) -> None:
        """Fit one site's matrices to what was counted, and put what is stored in their place."""
        encode = partial(self.encode, layer, site)
        with naming(site_name(layer, site)):
            try:
                if isinstance(sums, ExpertSums):
                    made = sums.fitted(encode, _damping, self.stream.dtype)
                else:
                    parts = {
                        f"{projection}.weight": len(part)
                        for projection, part in zip(
                            self.checkpoint.family_at(layer).projections[site],
                            self.checkpoint.projections(layer, site),
                            strict=True,
                        )
                    }
                    made = _fitted(sums, parts, encode, self.options)
            except SingularError as error:
                raise PackingError(f"{error}; give a larger --damping or more --refit-windows") from error
            for name, change in made.changes.items():
                if not change < 1:
                    raise PackingError(
                        f"{name}: fitting would change its weights by {change:.3g} of their size; give a larger "
                        "--damping or more --refit-windows"
                    )
        self.shard.keep_behind(_file(layer, site), made.tensors)
        self.names.append([layer, site, [*made.tensors]])
        self.rows.append({"site": site_name(layer, site), **_row(made.changes, made.before, made.after)})
        self.stream.replace(made.decoded)


def _fitted(
    sums: SiteSums,
    parts: Mapping[str, int],
    encode: Callable[[Tensor, Inputs | None], EncodedSite],
    options: RefitOptions,
) -> FittedSite:
    """What is stored of one matrix. parts: the names within the block of what is stacked in it, and their rows."""
    known, weight = sums.inputs(options.damping), sums.weight
    inputs = replace(known.inputs, damping=_damping(weight.shape[1], sums.count), shrunk=True)
    target = refitted(weight, known) if options.refit else weight
    made = encode(target, inputs if options.quantiser == "gptq" else None)
    rounded = encode(weight, None).weight
    before, after = (known.relative_error(weight, changed) for changed in (rounded, made.weight))
    moved = torch.sub(made.weight, weight, out=rounded)  # memory that is there already
    return FittedSite(
        made.tensors,
        dict(zip(parts, torch.split(made.weight, [*parts.values()]), strict=True)),
        {name: _relative(moved[part], weight[part]) for name, part in made.rows.items()},
        before,
        after,
    )


def _damping(columns: int, tokens: float) -> float:
    return SHRINKAGE * max(1.0, ENOUGH * columns / max(tokens, 1))


def _relative(moved: Tensor, weight: Tensor) -> float:
    return float(moved.norm() / weight.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _row(changes: Mapping[str, float], before: float, after: float) -> dict[str, Any]:
    """changes -- of the weights, relative, by tensor; before, after -- relative errors of the outputs, of the model's
    own weights rounded to nearest and of what is stored"""
    numbers = {"error_before": before, "error": after}
    return {"changes": _short(changes), **_short(numbers)}


def _short(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in numbers.items()}


def _section(
    calibration: str, options: RefitOptions, windows: int, sites: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    asked = {name: getattr(options, name) for name in ("refit", "quantiser", "refit_dense", "damping")}
    return {**asked, "windows": windows, "calibration_sha256": calibration, "sites": list(sites)}


def _file(layer: int, site: str) -> str:
    return f"fitted-{layer:05}-{site}"


def _kept(shard: Shard, layer: int, site: str, name: str) -> Tensor:
    return shard.state.load(_file(layer, site))[name]
