"""`trace`: run text through a model and record which neurons of the MLP, or which experts, are active for each token.

One decoder block at work at a time. Now and then the bit sets of the blocks that are done and the hidden states that
enter the next one are saved beside the output, in `.NAME.unfinished`; a run that was killed goes on from there.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepack.calibrate import folder as calibration_folder
from sparsepack.calibrate import histogram
from sparsepack.calibrate import trace_file as traces
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.provenance import made_from
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.trace_file import Trace
from sparsepack.errors import PlacementError
from sparsepack.files.hashing import fingerprint
from sparsepack.files.tensors import arithmetic
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.family import MLP_MID
from sparsepack.models.hf_config import expert_numbers
from sparsepack.models.hf_model.forecast import bound_line
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.hooks import routing_hooks, site_hooks
from sparsepack.models.tokenizer.windows import check_vocabulary, session_windows
from sparsepack.progress import Shorter, say
from sparsepack.version import __version__
from sparsepack.workers.shard import ALONE, Shard

DENSE = 0.99
"""A block that has more of its neurons active than this has none that could be left out."""


def trace(
    model: Checkpoint | str | Path,
    text: Text | str | Sequence[str],
    output: Path,
    options: TraceOptions | None = None,
    calibration: Calibration | Path | None = None,
    overwrite: bool = False,
) -> Trace:
    """Record who is active over text into the folder `output`.

    model -- opened, or what `open_checkpoint` opens; text -- read, or what `read_text` reads
    calibration -- of the model, needed with `options.share`: whose thresholds have that share

    A neuron is active where what enters the last matrix of the MLP is not zero, or is above the block's threshold. Of
    MLPs that are mixtures of experts the experts are traced: those that a token is given to.
    Raises `CheckpointError`, `CalibrationError`, `TextError`, `OutputError` and `PlacementError`: for a model whose
    neurons are all active.
    """
    checkpoint = checkpoint_of(model)
    text = text if isinstance(text, Text) else read_text(text)
    output, options = Path(output), options or TraceOptions()
    options.check()
    traces.check_output(output, overwrite)
    rule = _rule(checkpoint, options, calibration)
    windows, documents = _windows(checkpoint, text, options)
    manifest = _manifest(checkpoint, text, options, rule, windows, documents)
    with ALONE.saved_beside(output) as shard:
        shard = shard.resume(fingerprint([manifest, windows.tolist()]), checkpoint.layers)
        with torch.inference_mode():
            _run(checkpoint, windows, options, rule, shard)
        return traces.save(manifest, _files(windows, shard), output, overwrite)


def _files(windows: torch.Tensor, shard: Shard) -> Iterator[tuple[str, bytes]]:
    """Everything that a trace holds, a block in memory at a time."""
    for session, ids in enumerate(windows.numpy()):
        yield traces.ids_file(session), traces.packed_ids(ids)
    for layer in range(shard.done):
        for session, data in enumerate(_bytes(shard.block(layer))):
            yield traces.layer_file(session, layer), data


def _rule(checkpoint: Checkpoint, options: TraceOptions, calibration: Calibration | Path | None) -> dict[str, Any]:
    """The rule for active neurons, JSON-able: all that are not zero, or those above a threshold of their block."""
    if checkpoint.family.experts_of(0) is not None:
        if options.share is not None or calibration is not None:
            raise PlacementError(
                f"{checkpoint.name}: its MLPs have experts, and a token has those that the router gives it to; leave "
                "--share and --calibration out"
            )
        return {"active": "routed"}
    if options.share is None:
        if calibration is not None:
            raise PlacementError("a calibration is read for the thresholds of --share alone; give both or neither")
        return {"active": "nonzero"}
    if calibration is None:
        raise PlacementError(
            f"--share {options.share:g}: its thresholds come from a calibration; give --calibration, "
            "a folder made by `sparsepack calibrate`"
        )
    made = calibration if isinstance(calibration, Calibration) else calibration_folder.load(calibration)
    made.check_model(checkpoint)
    counts = [layer[f"{MLP_MID}.histogram.magnitude"] for layer in made.layers]
    thresholds = [histogram.quantile(each, 1 - options.share) for each in counts]
    return {"active": "threshold", "share": options.share, "thresholds": thresholds, "calibration": made.sha256}


def _windows(checkpoint: Checkpoint, text: Text, options: TraceOptions) -> tuple[torch.Tensor, list[int | None]]:
    limit = checkpoint.config.max_position_embeddings
    if options.tokens > limit:
        raise PlacementError(f"tokens {options.tokens}: {checkpoint.name} was made for at most {limit}")
    windows, documents = session_windows(checkpoint.tokenizer, text, options.tokens, options.sessions)
    check_vocabulary(checkpoint.tokenizer, windows, checkpoint.config.vocab_size, text)
    if len(windows) < options.sessions:
        say(f"note: the text has no more than {len(windows)} sessions of {options.tokens} tokens")
    return windows, documents


def _manifest(
    checkpoint: Checkpoint,
    text: Text,
    options: TraceOptions,
    rule: dict[str, Any],
    windows: torch.Tensor,
    documents: list[int | None],
) -> dict[str, Any]:
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    made = made_from(checkpoint, text, options.device, dtype, options.batch)
    return {
        "schema": traces.SCHEMA,
        "kind": "trace",
        "sparsepack": __version__,
        **made,
        "model": {**made["model"], "activation": _activation(checkpoint)},
        "intermediate": units_of(checkpoint),
        "rule": rule,
        "sessions": [
            {"text": 0, "document": document, "tokens": windows.shape[1], "prompt": options.prompt}
            for document in documents
        ],
    }


def _run(
    checkpoint: Checkpoint, windows: torch.Tensor, options: TraceOptions, rule: dict[str, Any], shard: Shard
) -> None:
    """Leave the bit sets of every block and session in the state."""
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    stream = open_blocks(checkpoint, options.device, dtype)
    hidden = stream.states(windows, shard.hidden())
    batches = -(-len(windows) // options.batch)
    shorter = Shorter("--sessions", len(windows))
    experts, units = checkpoint.family.experts_of(0) is not None, units_of(checkpoint)
    with shard.blocks("tracing", batches, 1, shorter, partial(bound_line, stream)) as (unfinished, advance):
        for layer in unfinished:
            stream.load(layer)
            found: list[tuple[float, bytes]] = []  # of each session the share that is active, and the bit sets
            threshold = rule["thresholds"][layer] if "thresholds" in rule else 0.0

            def record(_: int, site: str, x: torch.Tensor, into: Any = found, above: float = threshold) -> None:
                if site == MLP_MID:
                    active = (x.float().abs() > above).cpu().numpy()
                    into.extend((float(each.mean()), traces.packed_bits(each)) for each in active)

            def route(chosen: torch.Tensor, into: Any = found) -> None:
                for each in chosen.cpu():
                    active = torch.zeros(len(each), units, dtype=torch.bool).scatter_(1, each, True)
                    into.append((0.0, traces.packed_bits(active.numpy())))

            sites = site_hooks([(layer, stream.block)], checkpoint.family, record)
            with routing_hooks(stream.block, checkpoint.family, route, layer) if experts else sites:
                stream.pass_on(hidden, options.batch, advance)
            density = float(np.mean([share for share, _ in found]))
            if density > DENSE and "thresholds" not in rule:  # else so many are what was asked for
                raise PlacementError(_all_active(checkpoint, layer, density))
            shard.save_block(layer, _tensors([data for _, data in found]), hidden)


def units_of(checkpoint: Checkpoint) -> int:
    """Neurons of a block, or its experts. Raises `PlacementError` where blocks have not as many, or none."""
    found = set()
    for layer in range(checkpoint.layers):
        experts = expert_numbers(checkpoint.config, layer)
        has_mlp = MLP_MID in checkpoint.family.projections_of(layer)
        of_mlp = checkpoint.stacked_shape(MLP_MID, layer)[1] if has_mlp else 0
        found.add((experts is not None, of_mlp if experts is None else experts.count))
    if len(found) > 1 or (False, 0) in found:
        told = ", ".join(f"{count} {'experts' if of_experts else 'neurons'}" for of_experts, count in sorted(found))
        raise PlacementError(f"{checkpoint.name}: a trace is of blocks with equal MLPs; here they have {told}")
    return found.pop()[1]


def _activation(checkpoint: Checkpoint) -> str:
    names = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function", "activation")
    said = (checkpoint.family.setting(checkpoint.config, name) for name in names)
    return str(next((each for each in said if each is not None), "unknown"))


def _all_active(checkpoint: Checkpoint, layer: int, density: float) -> str:
    return (
        f"{checkpoint.name}: {density:.1%} of the neurons of block {layer} are active for a token "
        f"(activation {_activation(checkpoint)}); expected a model whose activation makes most of them zero, as "
        "ReLU does. To trace those that matter most, give --share and --calibration"
    )


def _tensors(sessions: list[bytes]) -> dict[str, torch.Tensor]:
    return {
        f"{number:05}": torch.frombuffer(bytearray(data), dtype=torch.uint8) for number, data in enumerate(sessions)
    }


def _bytes(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    return [tensors[name].numpy().tobytes() for name in sorted(tensors)]
