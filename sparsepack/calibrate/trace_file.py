"""A trace: who was active when, neurons or experts. A folder of bit sets, read a session and a block at a time;
docs/placement.md has it.

    trace.json                        what was traced, and the SHA-256 of every other file
    session-00000/tokens.zlib         the token ids that were run: int32 [tokens]
    session-00000/layer-00000.zlib    uint8 [tokens, ceil(neurons / 8)]: of each token a bit for every neuron, the
                                      lowest bit first

All numbers are little endian, and zlib packs every file.

How often each neuron was active, as a calibration or a trace says it: one record of either.
"""

import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from sparsepack.calibrate import folder
from sparsepack.calibrate.activity_report import Unit, added
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.provenance import (
    StoredCompute,
    StoredModel,
    StoredText,
    StoredTokenizer,
    check_mergeable,
    read_manifest,
)
from sparsepack.calibrate.statistics import Activity, activity
from sparsepack.calibrate.trace import MANIFEST
from sparsepack.errors import PackingError, PlacementError
from sparsepack.files import atomic
from sparsepack.files.hashing import NO_HASH, fingerprint, sha256_bytes
from sparsepack.files.stored import Count, Name, Size, Stored
from sparsepack.models.activity import NeuronCounts
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_MID

SCHEMA = 1
_MUST_AGREE = ("model.sha256", "tokenizer.sha256", "intermediate", "rule", "compute.dtype")
MOST_SESSIONS = 100_000
_MOST_BITS = 1 << 33
"""A session's block has at most this many bits: what is read is unpacked, and no file may ask for more memory than
there is."""


class _Session(Stored):
    document: Count | None
    tokens: Annotated[Size, Field(le=1 << 24)]
    prompt: Count
    text: Count


class _Rule(Stored):
    active: Literal["nonzero", "threshold", "routed"]
    share: Annotated[float, Field(gt=0, lt=1)] | None = None


class _TraceManifest(Stored):
    """What is read of a manifest."""

    kind: Literal["trace"]
    model: StoredModel
    intermediate: Annotated[Size, Field(le=1 << 24)]
    rule: _Rule
    tokenizer: StoredTokenizer
    texts: list[StoredText]
    sessions: Annotated[list[_Session], Field(min_length=1, max_length=MOST_SESSIONS)]
    compute: StoredCompute
    files: dict[Name, Name]


@dataclass(frozen=True)
class Session:
    """A stretch of text: how many tokens were run, and how many of them, the first ones, are the prompt."""

    tokens: int
    prompt: int


@dataclass(frozen=True)
class Trace:
    """A trace whose manifest was read and checked; bit sets are read, and checked, when they are asked for."""

    path: Path
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        return f"Trace({self.path}, {self.layers} blocks of {self.neurons} {self.unit}, {len(self.sessions)} sessions)"

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return int(self.manifest["model"]["layers"])

    @property
    def unit(self) -> Unit:
        """What it traces; where others say neurons, it may be experts."""
        return "experts" if self.manifest["rule"]["active"] == "routed" else "neurons"

    @property
    def neurons(self) -> int:
        """Neurons of a block, or its experts."""
        return int(self.manifest["intermediate"])

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions of the trace, in the order of its texts."""
        return tuple(Session(row["tokens"], row["prompt"]) for row in self.manifest["sessions"])

    @property
    def sha256(self) -> str:
        """The hash of the manifest, which itself holds the hashes of all files."""
        return fingerprint(self.manifest)

    def active(self, session: int, layer: int) -> np.ndarray:
        """Which neurons were active in a block: bool [tokens, neurons]. Raises `PlacementError` for a damaged file."""
        width = -(-self.neurons // 8)
        tokens = self.sessions[session].tokens
        data = self._file(layer_file(session, layer), tokens * width)
        bits = np.frombuffer(data, np.uint8).reshape(tokens, width)
        return np.unpackbits(bits, axis=1, count=self.neurons, bitorder="little").view(np.bool_)

    def session(self, session: int) -> np.ndarray:
        """Which neurons were active in all blocks: bool [tokens, layers * neurons], one block after the other."""
        return np.concatenate([self.active(session, layer) for layer in range(self.layers)], axis=1)

    def activity(self, session: int) -> tuple[Activity, ...]:
        """How often the neurons of each block were active."""
        found = []
        for layer in range(self.layers):
            active = torch.from_numpy(self.active(session, layer))
            found.append(Activity(active.sum(0), len(active), int(active.sum(1).square().sum())))
        return tuple(found)

    def ids(self, session: int) -> np.ndarray:
        """The token ids that were run: int32 [tokens]."""
        data = self._file(ids_file(session), 4 * self.sessions[session].tokens)
        return np.frombuffer(data, "<i4")

    def check_same_model(self, sha256: str, what: str) -> None:
        """Raise `PlacementError` unless what has that hash is of this trace's model; `what` names it."""
        own = self.manifest["model"]
        if own["sha256"] != sha256:
            raise PlacementError(
                f"{what} is of a model with the weights {sha256[:12]}, the trace {self.path} of {own['name']} "
                f"({own['sha256'][:12]}); expected both of one model"
            )

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `PlacementError` unless this trace is of that model."""
        self.check_same_model(checkpoint.sha256, checkpoint.name)

    def _file(self, name: str, size: int) -> bytes:
        """A file unpacked, which must be of so many bytes."""
        path = self.path / name
        try:
            packed = path.read_bytes()
            inflate = zlib.decompressobj()
            data = inflate.decompress(packed, size + 1)
            whole = inflate.eof and not inflate.unused_data and len(data) == size
        except (OSError, zlib.error):
            packed, whole = b"", False
        if not whole or sha256_bytes(packed) != self.manifest["files"].get(name):
            raise PlacementError(f"{path}: missing, or changed since it was written; trace again")
        return data


def packed_bits(active: np.ndarray) -> bytes:
    """The bytes of a file of bit sets, of bool [tokens, neurons]."""
    return zlib.compress(np.packbits(active, axis=1, bitorder="little").tobytes())


def packed_ids(ids: np.ndarray) -> bytes:
    """The bytes of a file of token ids, of whole numbers [tokens]."""
    return zlib.compress(ids.astype("<i4").tobytes())


def check_output(path: Path, overwrite: bool) -> None:
    """Raise `OutputError` unless a trace can be written there: `overwrite` replaces traces only."""
    atomic.check_output(path, overwrite, folder=True, marker=MANIFEST)


def save(manifest: Mapping[str, Any], files: Iterable[tuple[str, bytes]], path: Path, overwrite: bool = False) -> Trace:
    """Write a trace, whole or not at all.

    manifest -- all but the hashes; files -- `ids_file` and `layer_file` name them, and what each holds
    """
    check_output(path, overwrite)
    hashes: dict[str, str] = {}
    with atomic.atomic_folder(path, overwrite) as folder:
        for name, data in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
            hashes[name] = sha256_bytes(data)
        return _with_manifest(manifest, hashes, folder, path)


def _with_manifest(manifest: Mapping[str, Any], hashes: Mapping[str, str], folder: Path, path: Path) -> Trace:
    whole = {**manifest, "files": dict(sorted(hashes.items()))}
    atomic.write_json(folder / MANIFEST, whole)
    return Trace(path, whole)


def is_trace(path: Path) -> bool:
    """Whether a path leads to a trace, perhaps a damaged one."""
    return (path / MANIFEST).is_file()


def load(path: Path) -> Trace:
    """Read and check a trace's manifest. Raises `PlacementError` saying what is wrong with it."""
    path = Path(path)
    atomic.restore_folder(path)
    if not is_trace(path):
        raise PlacementError(f"{path}: no {MANIFEST} in it; expected a folder made by `sparsepack trace`")
    manifest = read_manifest(path / MANIFEST, _TraceManifest, SCHEMA, PlacementError, "trace again", _check)
    return Trace(path, manifest)


def _check(found: _TraceManifest) -> None:
    """Raise ValueError where parts of a manifest contradict each other or ask for too much memory."""
    if (found.rule.share is None) != (found.rule.active != "threshold"):
        raise ValueError(f"rule: {found.rule.active}, of a share of {found.rule.share}")
    for number, session in enumerate(found.sessions):
        if session.tokens * found.intermediate > _MOST_BITS:
            raise ValueError(f"session {number}: {session.tokens} tokens of {found.intermediate} neurons")
        if session.prompt >= session.tokens:
            raise ValueError(f"session {number}: a prompt of {session.prompt} of {session.tokens} tokens")
        if session.text >= len(found.texts):
            raise ValueError(f"session {number}: of text {session.text}, there are {len(found.texts)}")


def merge_folders(first: Path, second: Path, output: Path, overwrite: bool = False) -> Trace:
    """`trace merge`: two traces of one model as a third with the sessions of both.

    Raises `PlacementError` where model, tokenizer, what is active or precision differ, or sessions would be there
    twice, and `OutputError`.
    """
    one, other = load(first), load(second)
    check_mergeable(one.manifest, other.manifest, _MUST_AGREE, PlacementError)
    sources = [(each, number) for each in (one, other) for number in range(len(each.sessions))]
    if len(sources) > MOST_SESSIONS:
        raise PlacementError(f"cannot merge: {len(sources)} sessions; a trace holds at most {MOST_SESSIONS}")
    contents = [_hashes(*source) for source in sources]
    if len(set(contents)) < len(contents):
        raise PlacementError("cannot merge: a session is in both traces and would count twice")
    check_output(output, overwrite)
    hashes: dict[str, str] = {}
    with atomic.atomic_folder(output, overwrite) as folder:
        for number, ((trace, session), known) in enumerate(zip(sources, contents, strict=True)):
            names = _files(number, trace.layers)
            (folder / names[0]).parent.mkdir()
            for old, new in zip(_files(session, trace.layers), names, strict=True):
                shutil.copyfile(trace.path / old, folder / new)
            hashes |= zip(names, known, strict=True)
        kept = {key: value for key, value in one.manifest.items() if key != "files"}
        texts = one.manifest["texts"] + other.manifest["texts"]
        shifted = [{**row, "text": row["text"] + len(one.manifest["texts"])} for row in other.manifest["sessions"]]
        manifest = {**kept, "texts": texts, "sessions": one.manifest["sessions"] + shifted}
        return _with_manifest(manifest, hashes, folder, output)


def ids_file(session: int) -> str:
    """The file of a session's token ids, within the folder."""
    return f"session-{session:05}/tokens.zlib"


def layer_file(session: int, layer: int) -> str:
    """The file of a session's bit sets of a block, within the folder."""
    return f"session-{session:05}/layer-{layer:05}.zlib"


def _files(session: int, layers: int) -> list[str]:
    return [ids_file(session), *(layer_file(session, layer) for layer in range(layers))]


def _hashes(trace: Trace, session: int) -> tuple[str, ...]:
    """The hashes of a session's files; each file is read, so that a damaged trace is not merged."""
    trace.ids(session)
    for layer in range(trace.layers):
        trace.active(session, layer)
    return tuple(trace.manifest["files"][name] for name in _files(session, trace.layers))


def calibration_or_trace(path: Path) -> Calibration | Trace:
    """What a folder holds, read and checked. Raises `CalibrationError` or `PlacementError` where it is damaged."""
    return load(path) if is_trace(path) else folder.load(path)


def neuron_counts(source: Calibration | Trace) -> NeuronCounts:
    """The counts of every block; of a trace those of all its sessions together.

    Raises `CalibrationError` where a calibration counted no neurons, `PlacementError` where a trace is damaged or
    blocks differ in width.
    """
    layers = _of_trace(source) if isinstance(source, Trace) else activity(source)
    widths = {len(layer.active) for layer in layers}
    if len(widths) > 1:
        raise PlacementError(f"blocks of {min(widths)} to {max(widths)} neurons; expected as many in each")
    origin = "trace" if isinstance(source, Trace) else "calibration"
    return NeuronCounts(torch.stack([layer.active for layer in layers]), layers[0].tokens, source.sha256, origin)


def predicted_counts(checkpoint: Checkpoint) -> NeuronCounts:
    """Counts of the number that there will be: which neurons are active is not known yet."""
    shape = (checkpoint.layers, checkpoint.stacked_shape(MLP_MID)[1])
    return NeuronCounts(torch.zeros(shape, dtype=torch.int64), 1, NO_HASH)


def counts_of_zeros(source: Calibration | Trace, checkpoint: Checkpoint) -> NeuronCounts:
    """`neuron_counts` of a model, where a neuron counts as inactive only if it is exactly zero.

    Raises `PackingError` for a trace by thresholds, and as `neuron_counts` and the `check_model` of either.
    """
    if isinstance(source, Trace) and source.manifest["rule"]["active"] != "nonzero":
        raise PackingError(
            f"{source.path}: its active neurons are those above thresholds, the format leaves out those that are "
            "exactly zero; trace again without --share"
        )
    source.check_model(checkpoint)
    return neuron_counts(source)


def _of_trace(trace: Trace) -> tuple[Activity, ...]:
    sessions = (trace.activity(number) for number in range(len(trace.sessions)))
    return reduce(lambda some, more: tuple(map(added, zip(some, more, strict=True))), sessions)
