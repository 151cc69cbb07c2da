"""`prune`: a model one block at a time, each block on what the pruned ones before it give.

Now and then the new tensors of the blocks that are done and the hidden states that enter the next one are saved beside
the output, in `.NAME.unfinished`, from which a run that was killed goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from sparsepack.calibration.folder import load as load_calibration
from sparsepack.errors import PruningError
from sparsepack.files.atomic import check_output
from sparsepack.files.hashing import fingerprint
from sparsepack.files.resume import ResumeState, state_beside
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.source_files import texts_of
from sparsepack.models.checkpoint.writer import made_of_blocks, write_checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.made import records_beside
from sparsepack.models.records.pattern import Pattern
from sparsepack.models.records.pruned import RECORD, Pruned, PrunedMatrix
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.sites import chosen_sites
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.bound import bound_told
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.option import check_type
from sparsepack.progress import Shorter, progress
from sparsepack.pruning.block import prune_block
from sparsepack.pruning.methods import METHODS
from sparsepack.pruning.options import PruneOptions
from sparsepack.reconstruction.inputs import Sums
from sparsepack.version import __version__


def prune(
    model: Checkpoint | str | Path,
    output: Path,
    options: PruneOptions,
    calibration: Path | None = None,
    overwrite: bool = False,
) -> Pruned:
    """Prune a model's matrices and write it as an ordinary checkpoint, a Hugging Face folder.

    calibration -- a folder made by `calibrate`, whose windows are run; magnitude takes none

    Embedding, output matrix, norms and biases stay as they are. Raises `PruningError` for options that make no sense,
    `CalibrationError` for a calibration of another model, `CheckpointError`, `SiteError` and `OutputError`.
    """
    check_type("model", model, Checkpoint | Path, PruningError)
    check_type("output", output, Path, PruningError)
    check_type("options", options, PruneOptions, PruningError)
    check_type("calibration", calibration, Path | None, PruningError)
    options.check()
    options.check_calibration(calibration)
    output = Path(output)
    check_output(output, overwrite, folder=True, marker=RECORD)
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    patterns = site_patterns(checkpoint, options)
    windows, digest = None, None
    if calibration is not None:
        read = load_calibration(calibration)
        read.check_model(checkpoint)
        windows, digest = spread_windows(read.windows, options.windows), read.sha256
    asked = {"model": checkpoint.sha256, "calibration": digest, "options": asdict(options)}
    with state_beside(output) as state:
        resume = ResumeState(state, fingerprint({"sparsepack": __version__, **asked}), checkpoint.layers)
        with torch.inference_mode():
            matrices = _run(checkpoint, windows, patterns, options, resume)
        made = Pruned(checkpoint.name, checkpoint.sha256, digest, asdict(options), tuple(matrices))
        pruned = made_of_blocks(checkpoint, resume.block)
        records = {**records_beside(checkpoint.path), RECORD: made.to_json()}
        write_checkpoint(pruned, texts_of(checkpoint), records, output, overwrite)
    return made


def site_patterns(checkpoint: Checkpoint, options: PruneOptions) -> dict[SiteKey, Pattern]:
    """The pattern of every site that is pruned, in order of execution. Raises `SiteError` where nothing matches."""
    chosen = chosen_sites(checkpoint, options.include, options.ignore)
    numbers = dict.fromkeys(chosen, (options.keep, options.of))
    for other in options.sites:
        numbers |= {
            key: (other.keep, other.of)
            for key in chosen_sites(checkpoint, (other.site,), (), called="site")
            if key in numbers
        }
    return {key: Pattern(keep, of) for key, (keep, of) in numbers.items() if keep < of}


def _run(
    checkpoint: Checkpoint,
    windows: Tensor | None,
    patterns: Mapping[SiteKey, Pattern],
    options: PruneOptions,
    resume: ResumeState,
) -> list[PrunedMatrix]:
    """Prune the blocks that are not finished; the matrices of all. windows: int64 [N, S], or None where no input
    matters."""
    stream = BlockStream(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))
    matrices = [TypeAdapter(PrunedMatrix).validate_json(json.dumps(row)) for row in resume.value("matrices", [])]
    hidden = None if windows is None else stream.states(windows, resume.hidden())
    batches = 0 if hidden is None else -(-len(hidden) // options.batch)
    each = 1 + 2 * batches
    shorter = None if hidden is None else Shorter("--windows", len(hidden))
    with (
        bound_told("pruning", stream, resume),
        progress("pruning", checkpoint.layers * each, resume.done * each, each, shorter) as advance,
    ):
        for layer in range(resume.done, checkpoint.layers):
            here = {site: patterns[layer, site] for site in SITES if (layer, site) in patterns}
            stream.load(layer)
            sums: dict[str, Sums] = {}
            if hidden is not None and here:
                sums = {site: _sums(checkpoint, site, layer, options, stream.device) for site in here}

                def count(_: int, site: str, x: Tensor, into: Mapping[str, Sums] = sums) -> None:
                    if site in into:
                        into[site].add(x)

                with site_hooks([(layer, stream.block)], checkpoint.family, count):
                    for batch in torch.split(hidden, options.batch):
                        stream(batch)
                        advance()
            else:
                advance(batches)
            inputs = {site: found.inputs(options.damping) for site, found in sums.items()}
            found, rows = prune_block(checkpoint, layer, here, inputs, options, stream.device)
            matrices += rows
            advance()
            if hidden is not None:
                stream.replace(found)
                stream.pass_on(hidden, options.batch, advance)
            resume.save_block(layer, found, hidden, matrices=[asdict(row) for row in matrices])
    return matrices


def _sums(checkpoint: Checkpoint, site: str, layer: int, options: PruneOptions, device: torch.device) -> Sums:
    columns = checkpoint.stacked_shape(site, layer)[1]
    return Sums(columns, METHODS[options.method].needs == "products", device)
