"""The pass over a model: block by block and site by site, in order of execution.

Each block is run once per site, the run cut short there, as for thresholds (`sparsity.sequential`): the second half of
every window sparse, the first half dense. All matrices upstream are by then what will be stored, refitted and
quantised. After each block its encoded matrices and the hidden states are kept; a run that was killed goes on from
there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.errors import PackingError, SingularError
from sparsepack.files.hashing import NO_HASH, fingerprint
from sparsepack.files.side_files import make_folder
from sparsepack.files.transfer import stacked_on
from sparsepack.formats.encoded import Encoded, EncodedSite, SiteEncoder
from sparsepack.formats.plan import naming
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.rule import Rules
from sparsepack.models.sites import site_name
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.bound import bound_told
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.models.verbs import check_taken
from sparsepack.progress import Shorter, progress
from sparsepack.reconstruction.inputs import Inputs
from sparsepack.refit.inputs import SiteInputs, SiteSums
from sparsepack.refit.options import RefitOptions
from sparsepack.refit.solve import refitted
from sparsepack.sparsity.sequential import inputs_of_site, sparse_second_half
from sparsepack.sparsity.thresholds import Thresholds
from sparsepack.version import __version__
from sparsepack.workers.resume import ResumeState

BATCH = 2
"""This many windows are run at a time."""


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
    encode: SiteEncoder,
    thresholds: Thresholds | None,
    options: RefitOptions,
    resume: ResumeState,
) -> Refit:
    """Fit and quantise the matrices of a model's sites.

    encode -- as the artifact will have them
    resume -- of this pass (`refit_state`): it keeps the matrices until the artifact is written

    Raises `PackingError` for a site whose products have no inverse or whose weights cannot be encoded, and
    `OutputError` where the disk refuses the state.
    """
    rules = thresholds.rules if thresholds else {}
    windows = spread_windows(calibration.windows, options.refit_windows)
    with torch.no_grad():
        _run(checkpoint, windows, encode, rules, options, resume)
    encoded = {
        name: partial(_kept, resume, layer, site, name)
        for layer, site, names in resume.value("names")
        for name in names
    }
    return Refit(_section(calibration.sha256, options, len(windows), resume.value("sites")), encoded)


def refit_state(
    state: Path,
    checkpoint: Checkpoint,
    calibration: Calibration,
    thresholds: Thresholds | None,
    options: RefitOptions,
    format: str,
) -> ResumeState:
    """The state of the pass, in a folder of its own within that of the run that makes the artifact.

    format -- all that decides how a site is encoded

    Raises `OutputError` as `ResumeState`.
    """
    asked = {
        "sparsepack": __version__,
        "model": checkpoint.sha256,
        "calibration": calibration.sha256,
        "format": format,
        "thresholds": thresholds.to_json() if thresholds else None,
        "options": asdict(options),
    }
    make_folder(state)
    return ResumeState(state / "refit", fingerprint(asked), checkpoint.layers)


def refit_to_come(checkpoint: Checkpoint, options: RefitOptions) -> Refit:
    """What will be known of the pass, in as much room, before it is run. Raises `CheckpointError` for a model with
    experts."""
    check_taken("refit", checkpoint.family, checkpoint.name)
    typical = 0.12346
    sites = [
        {"site": site_name(layer, site), **_row({f"{site_name(layer, site)}.weight": typical}, typical, typical)}
        for layer in range(checkpoint.layers)
        for site in SITES
    ]
    return Refit(_section(NO_HASH, options, options.refit_windows, sites), {})


def check_tokens(checkpoint: Checkpoint, windows: tuple[int, int], options: RefitOptions, halves: bool) -> None:
    """Raise `PackingError` for a calibration with fewer tokens than the widest site has inputs.

    windows -- how many the calibration has, and of how many tokens each
    halves  -- whether only their second halves tell of sparse inputs
    """
    count, length = min(options.refit_windows, windows[0]), windows[1]
    each = length - length // 2 if halves else length
    columns, site = max((checkpoint.stacked_shape(site)[1], site) for site in SITES)
    needed = -(-columns // each)
    if count < needed:
        where = "--refit-windows" if options.refit_windows < needed else "calibrate's --samples"
        raise PackingError(
            f"{count} calibration windows of {length} tokens: too few to fit weights to the {columns} inputs of "
            f"{site}; expected {needed} windows, by {where}"
        )


def _run(
    checkpoint: Checkpoint,
    windows: Tensor,
    encode: SiteEncoder,
    rules: Rules,
    options: RefitOptions,
    resume: ResumeState,
) -> None:
    """Fit the blocks that are not finished; `resume` has all of them then. windows: int64 [N, S]"""
    stream = BlockStream(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))
    hidden = stream.states(windows, resume.hidden())
    batches = torch.split(hidden, BATCH)
    names, sites = resume.value("names", []), resume.value("sites", [])
    dense = options.refit_dense if any(not rule.dense for rule in rules.values()) else None
    each = (len(SITES) + 1) * len(batches)
    shorter = Shorter("--refit-windows", len(hidden))
    with (
        bound_told("fitting weights", stream, resume),
        progress("fitting weights", checkpoint.layers * each, resume.done * each, each, shorter) as advance,
    ):
        for layer in range(resume.done, checkpoint.layers):
            stream.load(layer)
            for site in SITES:
                parts = checkpoint.projections(layer, site)
                weight = stacked_on(options.device, parts).float()
                sums = SiteSums(weight, rules.get((layer, site)), dense)

                def count(x: Tensor, into: SiteSums = sums) -> None:
                    into.add(x)
                    advance()

                inputs_of_site(stream, (layer, site), batches, rules, count)
                known = sums.inputs(options.damping)
                with naming(site_name(layer, site)):
                    made, row = _fitted(weight, known, partial(encode, layer, site), options)
                resume.keep_with_block(_file(layer, site), made.tensors)
                names.append([layer, site, [*made.tensors]])
                sites.append({"site": site_name(layer, site), **row})
                rows = [len(part) for part in parts]
                projections = zip(checkpoint.family.projections[site], torch.split(made.weight, rows), strict=True)
                stream.replace({f"{projection}.weight": part for projection, part in projections})
            with sparse_second_half(stream, layer, rules):
                stream.pass_on(hidden, BATCH, advance)
            resume.save_block(layer, {}, hidden, names=names, sites=sites)


def _fitted(
    weight: Tensor, known: SiteInputs, encode: Callable[[Tensor, Inputs | None], EncodedSite], options: RefitOptions
) -> tuple[EncodedSite, dict[str, Any]]:
    """What is stored of a matrix, and the numbers of its row. Raises `PackingError`."""
    try:
        target = refitted(weight, known) if options.refit else weight
        made = encode(target, known.inputs if options.quantiser == "gptq" else None)
    except SingularError as error:
        raise PackingError(f"{error}; give a larger --damping or more --refit-windows") from error
    moved = made.weight - weight
    changes = {name: _relative(moved[part], weight[part]) for name, part in made.rows.items()}
    for name, change in changes.items():
        if not change < 1:
            raise PackingError(
                f"{name}: fitting would change its weights by {change:.3g} of their size; give a larger --damping or "
                "more --refit-windows"
            )
    rounded = encode(weight, None).weight - weight
    return made, _row(changes, known.relative_error(rounded), known.relative_error(moved))


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


def _kept(resume: ResumeState, layer: int, site: str, name: str) -> Tensor:
    return resume.load(_file(layer, site))[name]
