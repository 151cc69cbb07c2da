"""The manifest inside an artifact: what it was made from, how, and what shapes it really holds, as one JSON string."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sparsepack.errors import ArtifactError
from sparsepack.files.stored import Count, Name, Size, Stored, shown, validate
from sparsepack.formats.attention import ATTENTION, AttentionSection
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.provenance import StoredDistillation
from sparsepack.models.provenance import distillation_in_words as distilled_in_words
from sparsepack.version import __version__

SCHEMA = 6
"""The newest schema, of models with matrices whose rows have scales (`formats.zigzag.reader`)."""

_TAILS_SCHEMA = 5
"""The schema of what else has matrices whose last rows are stored as a tail (`formats.zigzag.reader`)."""

_BASES_SCHEMA = 4
"""The schema of what else changes the basis of the residual stream between blocks."""

FILES_SCHEMA = 3
"""The schema of what else has `ATTENTION`, and of folders of several files of tensors
(`containers.safetensors.layout`)."""

_OLDEST = 2
"""The schema of everything else, and the oldest that is read."""

NEURONS = "neurons"
"""The key of what formats that store MLPs by neurons say of them: `formats.neuron`. No other format has it."""

PRUNING = "pruning"
"""The manifest says under this key what was pruned before: `models.provenance.Provenance.summary`."""

ROTATION = "rotation"
"""The manifest says under this key into which basis the model was rotated before:
`models.provenance.Provenance.summary`."""

DISTILLATION = "distillation"
"""The manifest says under this key how the model's weights were trained before:
`models.provenance.Provenance.summary`."""

REFIT = "refit"
"""The manifest says under this key how matrices were fitted to their inputs: `calibrate.refitting.Refit.section`."""

SCORE = "score"
"""The manifest says under this key what packing lost on held-out text: `packing_score`."""

SCORE_PLACEHOLDER = "~" * 1022
"""Stands under `SCORE` until the finished tensors are scored; JSON of as many bytes then takes its place."""

_OWN = ("schema", "kind", "sparsepack", "model", "tensors", "notes", "versions", ATTENTION, NEURONS)


class _Source(Stored):
    name: Name
    sha256: Name
    model_type: Name


class _Shape(Stored):
    shape: Annotated[list[Size], Field(min_length=1)] | None = None
    padding_rows: Count = 0


class _Row(Stored):
    layer: Count
    site: Name
    sparsity: float
    threshold: float
    expected: float | None = None


class _Outlook(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    overall: float
    of_sparse_sites: float


class _Thresholds(Stored):
    allocation: Name
    criterion: Name
    sparsity: float
    upstream: Name
    rows: list[_Row]
    expected: _Outlook | None = None


class _Pruning(Stored):
    method: Name
    permute: bool
    model: Name
    model_sha256: Name


class _Rotation(Stored):
    basis: Name
    boundaries: list[Count] = Field(default_factory=list)
    model: Name
    model_sha256: Name


class _Distillation(StoredDistillation):
    sparsity: float
    rank: Size | None


class _RefitSite(Stored):
    site: Name
    changes: dict[Name, Annotated[float, Field(ge=0, lt=1)]]
    error_before: Annotated[float, Field(ge=0)]
    error: Annotated[float, Field(ge=0)]


class _Refit(Stored):
    refit: bool
    quantiser: Name
    refit_dense: float
    damping: float
    windows: Count
    sites: Annotated[list[_RefitSite], Field(min_length=1)]


class _Calibration(Stored):
    sha256: Name


class _Calibrate(Stored):
    text: Name | list[Name] | None = None


class _Recipe(Stored):
    calibrate: _Calibrate | None = None


class _Figure(Stored):
    value: float | None
    stderr: float | None


class _Scores(Stored):
    perplexity_ratio: _Figure
    kl_divergence: _Figure
    top_token_agreement: _Figure


class _Score(Stored):
    windows: Size
    context: Size
    dense: _Scores
    decode: _Scores | None = None


class _ArtifactManifest(Stored):
    """What is read of a manifest, by whomever."""

    sparsepack: Name
    model: _Source
    tensors: dict[Name, _Shape]
    notes: list[Name]
    versions: dict[Name, Name] | None = None
    calibration: _Calibration | None = None
    recipe: _Recipe | None = None
    thresholds: _Thresholds | None = None
    pruning: _Pruning | None = None
    rotation: _Rotation | None = None
    distillation: _Distillation | None = None
    refit: _Refit | None = None
    score: _Score | None = None
    attention: AttentionSection | None = None


_LIBRARIES = ("torch", "transformers", "gguf", "numpy")


def make_manifest(
    kind: str,
    checkpoint: Checkpoint,
    provenance: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
    notes: Iterable[str],
    sha256: str,
    attention: Mapping[str, Any] | None = None,
    neurons: Mapping[str, Any] | None = None,
    tails: bool = False,
    row_scales: bool = False,
) -> dict[str, Any]:
    """The manifest of an artifact of `kind` made from `checkpoint`.

    provenance -- named parts that the caller knows, each JSON-able: calibration, recipe, thresholds, ...
    tensors    -- logical shape and padding of each matrix: {"shape": [rows, columns], "padding_rows": n}
    notes      -- where the artifact differs from what was asked, a sentence each
    sha256     -- the checkpoint's, which a container may come to know only once it is written
    attention  -- the section of sparse attention: `formats.attention`
    neurons    -- the section of an MLP's neurons: `formats.neuron`
    tails      -- whether last rows are stored as tails
    row_scales -- whether rows of matrices have scales
    """
    if taken := set(provenance) & set(_OWN):
        raise ValueError(f"provenance {sorted(taken)}: the manifest has keys of its own by that name")
    schema = _BASES_SCHEMA if checkpoint.bases else FILES_SCHEMA if attention else _OLDEST
    return {
        "schema": SCHEMA if row_scales else _TAILS_SCHEMA if tails else schema,
        "kind": kind,
        "sparsepack": __version__,
        "model": {
            "name": checkpoint.name,
            "sha256": sha256,
            "model_type": checkpoint.family.model_type,
        },
        **provenance,
        **({ATTENTION: dict(attention)} if attention else {}),
        **({NEURONS: dict(neurons)} if neurons else {}),
        "tensors": {name: dict(shape) for name, shape in tensors.items()},
        "notes": [*notes, *filter(None, [checkpoint.grid])],
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def with_score(header: bytes, score: Mapping[str, Any] | None) -> bytes:
    """Return a header of the same length with a score, or null, where `SCORE_PLACEHOLDER` stands."""
    place = json.dumps(SCORE_PLACEHOLDER).encode()
    value = json.dumps(score, allow_nan=False).encode()
    if len(value) > len(place):
        raise RuntimeError(f"the score takes {len(value)} bytes, {len(place)} are reserved")
    return header.replace(place, value.ljust(len(place)))


def source_made_from(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The hashes of the checkpoints that an artifact's source was made from by other verbs, as far as that is
    known."""
    records = [manifest.get(name) or {} for name in (PRUNING, DISTILLATION, ROTATION)]
    return tuple(record["model_sha256"] for record in records if "model_sha256" in record)


def refit_in_words(manifest: Mapping[str, Any]) -> str | None:
    """How matrices were fitted to their inputs, as a clause; None where they were not."""
    made = manifest.get(REFIT)
    if made is None:
        return None
    sites = made["sites"]
    before, after = (sum(site[name] for site in sites) / len(sites) for name in ("error_before", "error"))
    what = "fitted to the sparse inputs, " if made["refit"] else ""
    dense = f", {100 * made['refit_dense']:.3g} % of the inputs dense" if made["refit"] else ""
    return (
        f"{what}quantised by {made['quantiser']}, on {made['windows']} windows{dense}; weights changed by "
        f"{100 * max(weight_changes(manifest).values(), default=0):.1f} % at most, mean relative error of outputs "
        f"{after:.4f} (else {before:.4f})"
    )


def distillation_in_words(manifest: Mapping[str, Any]) -> str | None:
    """How the model's weights were trained, as a clause; None where they were not."""
    made = manifest.get(DISTILLATION)
    return None if made is None else distilled_in_words(made)


def weight_changes(manifest: Mapping[str, Any]) -> dict[str, float]:
    """How far the weights of tensors fitted to their inputs are from the model's, relative, by their names."""
    changes: dict[str, float] = {}
    for site in (manifest.get(REFIT) or {}).get("sites", ()):
        for name, change in site["changes"].items():  # of a tensor with weights of two sites, no more than the larger
            changes[name] = max(change, changes.get(name, 0.0))
    return changes


def read_manifest(stored: Any, where: str) -> dict[str, Any]:
    """The manifest from its JSON text or value (None: there is none), which stands at `where`.

    Raises `ArtifactError` where there is none, it does not hold together, or a newer sparsepack wrote it.
    """
    try:
        manifest = stored if isinstance(stored, dict) else json.loads(stored)
        schema, kind = manifest["schema"], manifest["kind"]
        if type(schema) is not int or schema < _OLDEST:
            raise TypeError(f"schema {str(schema)[:60]!r}")
        if schema > SCHEMA:
            raise ArtifactError(
                f"{where} has schema {schema} (sparsepack {str(manifest.get('sparsepack'))[:60]}), "
                f"this sparsepack {__version__} knows {SCHEMA}; update sparsepack"
            )
        if not isinstance(kind, str) or kind not in FORMATS:
            raise ArtifactError(f"{where}: unknown kind {str(kind)[:60]!r}; expected one of {', '.join(FORMATS)}")
        validate(_ArtifactManifest, manifest)
        if manifest.get(ATTENTION) is not None and not FORMATS[kind].attention:
            raise ValueError(f"{kind} has no place for {ATTENTION}")
        if manifest.get(NEURONS) is not None and not FORMATS[kind].mlp.by_count:
            raise ValueError(f"{kind} has no place for {NEURONS}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where} is missing or not understood ({shown(error)}); pack it again") from error
    return dict(manifest)
