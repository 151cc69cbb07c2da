"""The slid folder: a pruned model with its nonzero weights alone, in windows as 2:4 tensor cores take them.

Of each pruned Linear, in place of its `weight` [rows, columns] (`formats.codecs.slide`):

    NAME.weight             [rows, stored]                 I8, F8_E4M3 or BF16: the slid values
    NAME.weight_positions   [rows, stored / 4 rounded up]  U8: the positions in their windows, two bits each
    NAME.weight_scale       [rows]                         F32: of an output channel; absent for BF16

Everything else is the checkpoint's, in its own type. `stored` never is `columns`, so that a program which does not know
the format stops at the shape of `weight`. Nothing here depends on a GPU: what its library wants is made when the model
is loaded. config.json says in `quantization_config.patterns` which Linear has which pattern, `[keep, of]`, and with
`quantization_config.attention` true that the manifest has sparse attention: a copy by transformers leaves that behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.codecs import gptq
from sparsepack.formats.codecs import slide as slid_matrix
from sparsepack.formats.codecs.slide import Slide, dequantised, quantise_rows
from sparsepack.formats.containers.safetensors.container import ArtifactFolder
from sparsepack.formats.containers.safetensors.writer import FolderPlan, model_texts
from sparsepack.formats.encoded import EncodedSite, SiteEncoder
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, PlanRequest, alone, manifest_shapes, tensors_of
from sparsepack.formats.slid.artifact import SlidArtifact, slid_tensors, value_type
from sparsepack.formats.table import Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.records.pattern import Pattern
from sparsepack.models.verbs import check_taken
from sparsepack.reconstruction import Inputs

SLID_AT_ONCE = 16
"""This many matrices are slid side by side for a CUDA device: hashing and writing take many times as long as sliding,
and a matrix takes little more memory there than its weights."""

_OWN_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model of a family that no format holds."""
    check_taken("pack", checkpoint.family, checkpoint.name)


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    """A pruned model as a slid folder. Writing it holds one matrix in memory; a CUDA device holds `SLID_AT_ONCE`, and
    the host 32 MiB of each.

    Raises `PackingError` where nothing is pruned, or windows cannot hold a pattern; writing raises it naming a matrix
    that does not have its pattern, and its first wrong group.
    """
    patterns = _patterns(checkpoint, request)
    slides = {name: Slide(pattern) for name, pattern in patterns.items()}
    groups = tuple(_groups(format, checkpoint, slides, request))
    left = sorted(name for name in _matrices(checkpoint) if name not in slides)
    notes = [f"{len(left)} matrices are not pruned and stay as they are: {left[0]} the first"] if left else []
    notes += request.notes
    said: dict[str, Any] = {"patterns": {name: [pattern.keep, pattern.of] for name, pattern in patterns.items()}}
    if request.attention is not None:
        said["attention"] = True
    return FolderPlan(
        format=format.name,
        groups=groups,
        notes=tuple(notes),
        at_once=tensors_at_once(request.device, SLID_AT_ONCE),
        source=checkpoint.source.hash,
        manifest=partial(
            make_manifest,
            format.name,
            checkpoint,
            request.provenance,
            manifest_shapes(tensors_of(groups)),
            notes,
            attention=request.attention,
        ),
        texts=model_texts(checkpoint, format.name, **said),
    )


def _patterns(checkpoint: Checkpoint, request: PlanRequest) -> Mapping[str, Pattern]:
    if request.pattern is not None:
        return dict.fromkeys(_matrices(checkpoint), request.pattern)
    if not request.patterns:
        raise PackingError(
            f"{checkpoint.name}: nothing says which of its weights were pruned; prune it (in a recipe, add a prune "
            "section), or give --keep and --of for a model that was pruned elsewhere"
        )
    return request.patterns


def _matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of all matrices of the blocks, without `.weight`."""
    names = [name for of_site in checkpoint.family.projections.values() for name in of_site]
    return [f"model.layers.{layer}.{name}" for layer in range(checkpoint.layers) for name in names]


def _groups(
    format: Format, checkpoint: Checkpoint, slides: Mapping[str, Slide], request: PlanRequest
) -> Iterator[PlannedGroup]:
    """What stays as it is, then the slid matrices: embedding and output take a thread longest, so they begin first."""
    source, values = checkpoint.source, value_type(format)
    slid = {f"{name}.weight": how for name, how in slides.items()}

    def own(name: str) -> Tensor:
        return _bytes(checkpoint.tensor(name))

    def made(name: str) -> Sequence[Tensor]:
        if name in request.encoded:
            return [give() for part, give in request.encoded.items() if part.startswith(name)]
        weight = stacked_on(request.device, [checkpoint.tensor(name)])
        parts = slid_matrix.encode(weight, slid[name], values.dtype, values.steps)
        return [_bytes(part) for part in parts if part is not None]

    for name, shape in source.shapes.items():
        if name not in slid:
            yield alone(PlannedTensor(name, shape, _OWN_TYPES[source.dtypes[name]]), partial(own, name))
    for name, how in slid.items():
        rows, columns = source.shapes[name]
        parts = tuple(
            PlannedTensor(part, shape, type, (rows, columns) if part == name else None, weights=part == name)
            for part, (shape, type) in slid_tensors(name, rows, how.stored(columns), values).items()
        )
        yield PlannedGroup(parts, partial(made, name))


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`). A matrix that is not pruned stays as it is."""
    values = value_type(format)
    assert values.steps is not None
    steps = values.steps
    slides = {name: Slide(pattern) for name, pattern in _patterns(checkpoint, request).items()}

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        tensors: dict[str, Tensor] = {}
        rows, start, decoded = {}, 0, weight.clone()
        for projection in checkpoint.family.projections[site]:
            name = f"{checkpoint.family.block(layer)}.{projection}"
            part = slice(start, start + checkpoint.source.shapes[f"{name}.weight"][0])
            start = part.stop
            if name not in slides:
                continue
            if inputs is None:
                q, scale = quantise_rows(weight[part], values.dtype, steps)
            else:
                q, scale = gptq.symmetric_rows(weight[part], inputs, values.dtype, steps)
            decoded[part] = dequantised(q, scale)
            stored = slid_matrix.encode(q.float(), slides[name], values.dtype, scale=scale)
            names = slid_tensors(f"{name}.weight", 0, 0, values)
            tensors |= {of: _bytes(made) for of, made in zip(names, stored, strict=True) if made is not None}
            rows[f"{name}.weight"] = part
        return EncodedSite(tensors, decoded, rows)

    return encode


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    """A slid folder that has been opened. Raises `ArtifactError` where it does not hold together."""
    artifact = SlidArtifact(manifest, folder)
    artifact.check_shapes()
    return artifact
