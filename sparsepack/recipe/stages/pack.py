"""`pack`: the artifact, and its description."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType
from rich.markup import escape

from sparsepack.artifacts.formats import FORMATS, those_with
from sparsepack.errors import CheckpointError, PackingError, UserError
from sparsepack.files.atomic import write_json
from sparsepack.pack import PackRequest
from sparsepack.progress import say
from sparsepack.recipe.console import table
from sparsepack.recipe.gates import Value, Verdict, judged
from sparsepack.recipe.section import Recipe, Section, Text, limit
from sparsepack.recipe.stage import Job, Stage, read_json
from sparsepack.recipe.stages.calibrate import AGAIN, CALIBRATE, FOLDER, Calibrate, folder_of
from sparsepack.recipe.stages.prune import pruned, record_to_come
from sparsepack.recipe.stages.thresholds import TABLE, THRESHOLDS, sparse, thresholds_to_come
from sparsepack.runtime.hybrid.options import PlacesOptions
from sparsepack.sparsity.attention_options import AttentionOptions

if TYPE_CHECKING:
    from sparsepack.models.neurons import NeuronCounts
    from sparsepack.sparsity.attention import FoundAttention

DESCRIPTION = "pack.json"
_MADE_FROM = ("name", "model", "dtype", "calibrate", "prune", "activation_sparsity", "pack")


class Pack(Section):
    """The artifact. Sparse attention takes its channels from the calibration, which is made again of a pruned model."""

    key: ClassVar[str] = "pack"
    options: ClassVar[type] = PackRequest
    also: ClassVar[tuple[type, ...]] = (AttentionOptions,)

    format: str
    output_type: str
    embedding_type: str
    keep: int | None
    of: int | None
    attention: str
    channels: int | None
    tokens: Text
    sinks: int
    recent: int
    min_context: int
    dense_layers: Text

    @property
    def sparse_attention(self) -> AttentionOptions:
        """What it asks for of attention."""
        return AttentionOptions(**{field.name: getattr(self, field.name) for field in fields(AttentionOptions)})

    @property
    def for_request(self) -> dict[str, Any]:
        """The fields of a `PackRequest` that are given here."""
        others = self.model_dump(exclude={field.name for field in fields(AttentionOptions)})
        return {**others, "sparse_attention": self.sparse_attention}


def sparse_attention(recipe: Recipe) -> bool:
    """Whether the artifact will have attention that reads some of the tokens alone."""
    asked = Pack.asked_in(recipe)
    return asked is not None and asked.sparse_attention.sparse


def calibrated(recipe: Recipe) -> bool:
    """Whether the artifact takes something from the calibration itself, not by way of thresholds."""
    return sparse_attention(recipe) or by_neurons(recipe)


def by_neurons(recipe: Recipe) -> bool:
    """Whether the artifact stores MLPs by neurons."""
    asked = Pack.asked_in(recipe)
    return asked is not None and FORMATS[asked.format].neurons


def places_problems(name: str, recipe: Recipe, cached: float | None, policy: str | None) -> Iterator[str]:
    """What is wrong with the places that a stage asks for."""
    try:
        asked = PlacesOptions(cached, policy).asked
    except UserError as error:
        yield f"{name}: {error}"
        return
    if asked and not by_neurons(recipe):
        able = those_with("neurons")
        yield f"{name}.cached: the artifact's MLPs are not stored by neurons; expected pack.format {able}"
    if asked and recipe.device != "cpu":
        yield f"{name}.cached: two workers share the CPU so far; expected device cpu"


def artifact_name(asked: Pack) -> str:
    """Of the artifact in the work folder."""
    return f"model{FORMATS[asked.format].suffix}"


def artifact_of(job: Job) -> Path:
    """Where the artifact of a recipe that packs lies."""
    asked = Pack.asked_in(job.recipe)
    assert asked is not None
    return job.folder / artifact_name(asked)


def needs_engine(name: str, recipe: Recipe) -> Iterator[str]:
    """What is wrong where a stage runs the artifact and there is none to run."""
    asked = Pack.asked_in(recipe)
    if asked is None or not FORMATS[asked.format].runs:
        yield f"{name}: it runs an artifact; expected a pack section of format {those_with('runs')}"


def provenance(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that the artifact depends on, for its manifest."""
    value = recipe.to_json()
    return {key: value[key] for key in _MADE_FROM}


def _problems(recipe: Recipe, asked: Pack) -> Iterator[str]:
    format = FORMATS[asked.format]
    if sparse(recipe) and not format.thresholds:
        yield (
            f"pack.format: a {format.name} {format.container} has no place for thresholds; "
            f"expected {those_with('thresholds')}, or no activation_sparsity"
        )
    if asked.keep is not None and pruned(recipe):
        yield "pack.keep: it is for a model that was pruned elsewhere; leave it out, prune says what stays"
    calibration = Path(FOLDER) if calibrated(recipe) else None
    if calibration is not None and Calibrate.asked_in(recipe) is None:
        what = "format: it stores neurons by how often they are active on"
        if sparse_attention(recipe):
            what = "attention: its channels are chosen on"
        yield f"pack.{what} calibration text; add a calibrate section"
    try:
        PackRequest(recipe.model, Path(artifact_name(asked)), calibration=calibration, **asked.for_request).check()
    except PackingError as error:
        yield f"pack: {error}"


def _misfits(job: Job, asked: Pack) -> Iterator[str]:
    """Whether any format holds the model; what of attention it does not have; of a format that leaves out zeros:
    whether there will be any, in a pattern that it can hold."""
    from sparsepack.models.families import check_packable
    from sparsepack.models.pruned import pruning_record
    from sparsepack.pack import plan_of
    from sparsepack.sparsity.attention import channels_asked

    try:
        check_packable(job.checkpoint.family, job.checkpoint.name)
    except CheckpointError as error:
        yield f"pack: {error}"
        return
    if asked.sparse_attention.sparse:
        try:
            channels_asked(job.checkpoint, asked.sparse_attention)
        except PackingError as error:
            yield f"pack: {error}"
    format, record = FORMATS[asked.format], record_to_come(job)
    if format.neurons:
        try:
            plan_of(job.checkpoint, request_of(job, asked), None, neurons=_neurons_to_come(job, asked))
        except PackingError as error:
            yield f"pack.format: {error}"
    if not format.weight_sparsity:
        return
    if asked.keep is None and record is None and pruning_record(job.checkpoint.path) is None:
        yield (
            f"pack.format: {format.name} leaves out the zeros of a pruned model, {job.checkpoint.name} is not pruned; "
            "add a prune section, or give pack.keep and pack.of if it was pruned elsewhere"
        )
    try:
        plan_of(job.checkpoint, request_of(job, asked), None, record)
    except PackingError as error:
        yield f"pack.format {format.name}: {error}"


def request_of(job: Job, asked: Pack) -> PackRequest:
    """The section as what `pack` takes."""
    recipe = job.recipe
    return PackRequest(
        model=job.model,
        output=artifact_of(job),
        calibration=folder_of(job) if calibrated(recipe) else None,
        thresholds=job.folder / TABLE if sparse(recipe) else None,
        device=recipe.device,
        overwrite=True,
        recipe=provenance(recipe),
        **asked.for_request,
    )


def _attention_to_come(job: Job, asked: Pack) -> "FoundAttention | None":
    """Sparse attention of about as many channels as there will be: which layers are dense is not known yet."""
    import torch

    from sparsepack.files.hashing import NO_HASH
    from sparsepack.models.heads import heads_of_config
    from sparsepack.models.sparse_attention import SparseAttention
    from sparsepack.sparsity.attention import FoundAttention, channels_asked

    options = asked.sparse_attention
    if not options.sparse:
        return None
    heads, count = heads_of_config(job.checkpoint.config), channels_asked(job.checkpoint, options)
    channels = torch.arange(heads.head_dim - count, heads.head_dim).expand(heads.kv_heads, -1)
    dense = options.dense or ()
    layers = tuple(None if layer in dense else channels for layer in range(job.checkpoint.layers))
    return FoundAttention(SparseAttention(options.policy, layers), NO_HASH)


def _neurons_to_come(job: Job, asked: Pack) -> "NeuronCounts | None":
    """As many counts as there will be: which neurons are active is not known yet."""
    import torch

    from sparsepack.files.hashing import NO_HASH
    from sparsepack.models.families import MLP_MID
    from sparsepack.models.neurons import NeuronCounts

    if not FORMATS[asked.format].neurons:
        return None
    shape = (job.checkpoint.layers, job.checkpoint.stacked_shape(MLP_MID)[1])
    return NeuronCounts(torch.zeros(shape, dtype=torch.int64), 1, NO_HASH)


def _run(job: Job, asked: Pack) -> None:
    from sparsepack.artifacts.inspect import describe
    from sparsepack.pack import pack

    for note in pack(request_of(job, asked), job.checkpoint).notes:
        say(f"pack: {note}")
    # Without its path: a work folder may be moved, and what needs this stage compares the bytes of its outputs.
    description = {name: value for name, value in describe(artifact_of(job)).items() if name != "path"}
    write_json(job.folder / DESCRIPTION, description)


def _plan(job: Job, asked: Pack | None) -> dict[str, Any]:
    from sparsepack.pack import plan_of

    if asked is None:
        return {"artifact": None}
    planned = plan_of(
        job.checkpoint,
        request_of(job, asked),
        thresholds_to_come(job),
        record_to_come(job),
        _attention_to_come(job, asked),
        _neurons_to_come(job, asked),
    )
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in planned.tensors:
        types[tensor.type]["tensors"] += 1
        types[tensor.type]["bytes"] += tensor.nbytes
    tensors = [
        {"name": t.name, "shape": t.shape, "logical": t.logical_shape, "type": t.type, "bytes": t.nbytes}
        for t in planned.tensors
    ]
    artifact = {
        "format": planned.format,
        "file_bytes": planned.total_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "types": dict(types),
        "tensors": tensors,
        "notes": list(planned.notes),
    }
    return {"artifact": artifact}


def _show_plan(plan: Mapping[str, Any]) -> Iterator[RenderableType]:
    artifact = plan["artifact"]
    if artifact is None:
        return
    made = table(f"artifact, {artifact['format']}", "type", ">tensors", ">bytes")
    for kind, row in artifact["types"].items():
        made.add_row(kind, str(row["tensors"]), f"{row['bytes']:,}")
    yield made
    yield f"file: about {artifact['file_bytes']:,} bytes, {artifact['bits_per_weight']:.3f} bits per weight"
    for note in artifact["notes"]:
        yield f"note: {escape(note)}"


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["pack"]
    if made is not None:
        bits = made["bits_per_weight"]
        yield (
            f"file: {escape(report['artifact'])}, {made['file_bytes']:,} bytes, {bits['file']:.3f} bits per weight "
            f"({bits['blocks']:.3f} in the blocks)"
        )


def _unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    for name in ("bits_per_weight", "file_bytes"):
        if getattr(gates, name) is not None and Pack.asked_in(recipe) is None:
            yield f"gates.{name}: there is no file; add a pack section"


def _judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    made = report["pack"]
    if made is not None:
        yield from judged(
            "bits_per_weight", gates.bits_per_weight, [Value("the file", made["bits_per_weight"]["file"])]
        )
        yield from judged("file_bytes", gates.file_bytes, [Value("the file", float(made["file_bytes"]))])


PACK = Stage(
    name="pack",
    key=Pack.key,
    type=Pack | None,
    needs=(CALIBRATE.name, AGAIN, THRESHOLDS.name),
    outputs=lambda asked: (artifact_name(asked), DESCRIPTION),
    settings=lambda job, asked: provenance(job.recipe),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    plan=_plan,
    show_plan=_show_plan,
    result=("pack", read_json(DESCRIPTION), None),
    show=_show,
    gates={"bits_per_weight": limit("Of the whole file."), "file_bytes": limit("Size of the file.")},
    unmeasured=_unmeasured,
    judge=_judge,
)
