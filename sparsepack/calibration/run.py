"""`calibrate`: one streaming pass over text, block by block, that collects every statistic any packer needs.

Now and then the statistics of the blocks that are done and the hidden states that enter the next one are saved beside
the output, in `.NAME.unfinished`. A run that was killed goes on from there with the hidden states it really had.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparsepack.calibration import collectors, folder
from sparsepack.calibration.collectors import Statistics
from sparsepack.calibration.collectors.residual import ends_run
from sparsepack.calibration.criteria import column_norms
from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.heads import heads_of
from sparsepack.calibration.made_from import made_from
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.residual import residual_of
from sparsepack.calibration.samples import samples_of
from sparsepack.errors import CalibrationError
from sparsepack.files.hashing import fingerprint
from sparsepack.files.resume import ResumeState, state_beside
from sparsepack.files.text import Text, read_text
from sparsepack.formats.table import holders
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import ATTN_OUT, MLP_MID
from sparsepack.models.heads import heads_of_config
from sparsepack.models.precision import arithmetic
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.bound import bound_told
from sparsepack.models.stock.hooks import site_hooks, stream_hooks
from sparsepack.models.tokenizer.windows import check_vocabulary, drawn_windows, window_length
from sparsepack.option import check_type
from sparsepack.progress import Shorter, progress, say
from sparsepack.version import __version__


def calibrate(
    model: Checkpoint | str | Path,
    text: Text | str | Sequence[str],
    output: Path,
    options: CalibrateOptions | None = None,
    overwrite: bool = False,
) -> Calibration:
    """Collect the statistics of a model over text into the folder `output` (section "Calibration folder").

    model -- opened, or what `open_checkpoint` opens; text -- read, or what `read_text` reads

    Before anything is run a note says which formats can hold the model. Raises `CheckpointError`, `CalibrationError`,
    `TextError` (too short, or tokens beyond the model) and `OutputError`.
    """
    check_type("model", model, Checkpoint | Path, CalibrationError)
    check_type("text", text, Text | str | tuple[str, ...], CalibrationError)
    check_type("output", output, Path, CalibrationError)
    check_type("options", options, CalibrateOptions | None, CalibrationError)
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    text = text if isinstance(text, Text) else read_text(text)
    output = Path(output)
    options = options or CalibrateOptions()
    context = window_length(options.context, checkpoint.config.max_position_embeddings)
    samples = samples_of(checkpoint, options.samples, context, options.device)
    options = replace(options, context=context, samples=samples)
    options.check()
    folder.check_output(output, overwrite)
    windows = _chosen_windows(checkpoint, text, options)
    manifest = _manifest(checkpoint, text, windows, options)
    say(f"note: {holders(checkpoint)}")
    with state_beside(output) as state:
        with torch.inference_mode():
            layers = _run(checkpoint, windows, options, ResumeState(state, fingerprint(manifest), checkpoint.layers))
        return folder.save(Calibration(manifest, tuple(layers), windows), output, overwrite)


def _chosen_windows(checkpoint: Checkpoint, text: Text, options: CalibrateOptions) -> torch.Tensor:
    limit = checkpoint.config.max_position_embeddings
    context = window_length(options.context, limit)
    if context > limit:
        raise CalibrationError(f"context {context}: {checkpoint.name} was made for at most {limit}")
    windows = drawn_windows(checkpoint.tokenizer, text, context, options.samples or 0, options.seed)
    if windows.shape[1] <= options.sinks:
        raise CalibrationError(
            f"context {context}, sinks {options.sinks}: without a BOS token a window has "
            f"{windows.shape[1]} positions, none is left to count; give a larger context"
        )
    check_vocabulary(windows, checkpoint.config.vocab_size, text)
    return windows


def _manifest(checkpoint: Checkpoint, text: Text, windows: torch.Tensor, options: CalibrateOptions) -> dict[str, Any]:
    count, context = windows.shape
    return {
        "schema": folder.SCHEMA,
        "kind": "calibration",
        "sparsepack": __version__,
        **made_from(checkpoint, text, options.device, _dtype(checkpoint, options), options.batch),
        "attention": heads_of(checkpoint),
        "residual": residual_of(checkpoint),
        "tokens": {
            "windows": count,
            "context": options.context,
            "run": count * context,
            "counted": count * (context - options.sinks),
            "sinks": options.sinks,
            "sinks_left_out": count * options.sinks,
            "padding_left_out": 0,  # windows are always full
            "samples_asked": options.samples,
            "seed": options.seed,
        },
    }


def _dtype(checkpoint: Checkpoint, options: CalibrateOptions) -> torch.dtype:
    return arithmetic(options.dtype, checkpoint.dtype, options.device)


def _run(
    checkpoint: Checkpoint, windows: torch.Tensor, options: CalibrateOptions, resume: ResumeState
) -> list[Statistics]:
    stream = BlockStream(checkpoint, options.device, _dtype(checkpoint, options))
    layers = [collectors.of_block(*block) for block in enumerate(resume.blocks())]
    hidden = stream.states(windows, resume.hidden())
    residual = residual_of(checkpoint) or {"runs": 0}
    heads = heads_of_config(checkpoint.config)
    epsilon = float(getattr(checkpoint.config, "rms_norm_eps", 0))
    of_run: Statistics = resume.kept(_of_run(len(layers)))
    batches = -(-len(windows) // options.batch)
    shorter = Shorter("--samples", len(windows))
    with (
        bound_told("calibrating", stream, resume),
        progress("calibrating", checkpoint.layers * batches, len(layers) * batches, 1, shorter) as advance,
    ):
        for layer in range(len(layers), checkpoint.layers):
            stream.load(layer)
            statistics: Statistics = {}
            norms = {site: column_norms(stream.block, names) for site, names in checkpoint.family.projections.items()}

            def collect(_: int, site: str, x: torch.Tensor, into: Any = statistics, norms: Any = norms) -> None:
                x = x[:, options.sinks :]
                collectors.count(into, "site", site, x, norms[site])
                if site == ATTN_OUT and checkpoint.family.residual is not None:
                    collectors.count(into, "outputs", "attention", x, heads.kv_heads, heads.head_dim)
                if site == MLP_MID:
                    collectors.count(into, "neurons", "neurons", x)

            def watch(query: torch.Tensor, key: torch.Tensor, window: int, into: Any = statistics) -> None:
                without = query[:, :, options.sinks :], key[:, :, options.sinks :]
                collectors.count(into, "attention", "attention", *without, window)
                collectors.count(into, "window", "attention", query, key, window)

            def read(states: torch.Tensor, into: Any = of_run) -> None:
                collectors.count(into, "residual", "residual", states[:, options.sinks :], epsilon)

            with (
                site_hooks([(layer, stream.block)], checkpoint.family, collect),
                stream_hooks(stream.block, checkpoint.family, read),
                stream.watched(watch),
            ):
                stream.pass_on(hidden, options.batch, advance)
            resume.drop(_of_run(layer))
            if ends_run(layer, checkpoint.layers, residual["runs"]):
                statistics |= {name: value.cpu() for name, value in of_run.items()}
                of_run = {}
            elif of_run:
                resume.keep_with_blocks(_of_run(layer + 1), of_run)
            layers.append(statistics)
            resume.save_block(layer, collectors.named(layer, statistics), hidden)
    return layers


def _of_run(done: int) -> str:
    """The name under which is kept what was counted of a run of blocks that is not over, `done` blocks finished."""
    return f"run-{done:05}"
