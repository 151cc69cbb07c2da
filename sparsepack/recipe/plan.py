"""`--dry-run`: what a recipe would make and cost, without running the model."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from sparsepack.artifacts.plan import Plan, manifest_shapes
from sparsepack.files.hashing import NO_HASH
from sparsepack.models.checkpoint import EMBEDDING, HEAD, Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.rule import SiteRule
from sparsepack.models.windows import tokenise
from sparsepack.pack import plan_of
from sparsepack.recipe.actions import pack_request
from sparsepack.recipe.consistency import Sources
from sparsepack.recipe.console import results, table
from sparsepack.recipe.schema import Recipe
from sparsepack.sparsity.allocation import site_name, sparse_sites
from sparsepack.sparsity.thresholds import Thresholds

_CHUNK = 256  # positions whose logits exist at one time, as in eval.perplexity
_TYPICAL = 0.12345678901234567  # a threshold as long as most, for the manifest's table
_LIVE = 4  # float32 tensors of a batch's widest activation that exist at one time


def make_plan(recipe: Recipe, sources: Sources, stages: Mapping[str, bool]) -> dict[str, Any]:
    """The plan, JSON-able. `stages`: name -> whether it would run."""
    checkpoint = sources.checkpoint
    planned = planned_artifact(recipe, checkpoint) if recipe.pack is not None else None
    return {
        "kind": "recipe plan",
        "recipe": recipe.to_json(),
        "model": {"name": checkpoint.name, "sha256": checkpoint.sha256, "parameters": _parameters(checkpoint)},
        "stages": [{"name": name, "status": "would run" if runs else "up to date"} for name, runs in stages.items()],
        "sites": _sites(recipe, checkpoint, planned),
        "patterns": _patterns(recipe, checkpoint),
        "artifact": None if planned is None else _artifact(planned),
        "tokens": _tokens(recipe, sources),
        "peak_memory_bytes": _memory(recipe, sources),
    }


def planned_artifact(recipe: Recipe, checkpoint: Checkpoint) -> Plan:
    """The artifact that the recipe's pack section makes. Raises `PackingError` for what does not fit."""
    table = _placeholder(recipe, checkpoint) if recipe.sparse else None
    return plan_of(checkpoint, pack_request(recipe, Path()), table)


def _placeholder(recipe: Recipe, checkpoint: Checkpoint) -> Thresholds:
    """Thresholds as long as those that will be found, with vectors where there will be vectors."""
    assert recipe.activation is not None
    asked = recipe.activation
    per_channel = asked.allocation == "global" or asked.criterion != "magnitude"
    rules = {(layer, site): SiteRule() for layer in range(checkpoint.layers) for site in SITES}
    for layer, site in sparse_sites(checkpoint, asked.include, asked.ignore):
        columns = checkpoint.stacked_shape(site, layer)[1]
        rules[layer, site] = SiteRule(
            threshold=_TYPICAL,
            offset=torch.zeros(columns) if asked.offsets else None,
            channel_weights=torch.ones(columns) if per_channel else None,
            sparsity=asked.sparsity,
            realised=_TYPICAL,
        )
    where = (checkpoint.sha256, NO_HASH, asked.allocation, asked.criterion)
    return Thresholds(*where, asked.sparsity, asked.upstream, rules)


def _parameters(checkpoint: Checkpoint) -> int:
    return sum(torch.Size(s).numel() for n, s in checkpoint.source.shapes.items() if n != HEAD or not checkpoint.tied)


def _sites(recipe: Recipe, checkpoint: Checkpoint, planned: Plan | None) -> list[dict[str, Any]]:
    asked = recipe.activation
    sparse = (
        set(sparse_sites(checkpoint, asked.include, asked.ignore)) if asked is not None and recipe.sparse else set()
    )
    stored = manifest_shapes(planned.tensors) if planned is not None else {}
    rows = []
    for layer in range(checkpoint.layers):
        for site in SITES:
            shape, name = checkpoint.stacked_shape(site, layer), site_name(layer, site)
            padding = stored[f"{name}.weight"]["padding_rows"] if f"{name}.weight" in stored else 0
            target = asked.sparsity if asked is not None and (layer, site) in sparse else 0.0
            rows.append({"site": name, "shape": list(shape), "padding_rows": padding, "sparsity": target})
    return rows


def _patterns(recipe: Recipe, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    if recipe.activation is None:
        return []
    given = [("include", p) for p in recipe.activation.include] + [("ignore", p) for p in recipe.activation.ignore]
    return [
        {"list": which, "pattern": p, "sites": [site_name(*key) for key in sparse_sites(checkpoint, [p], [])]}
        for which, p in given
    ]


def _artifact(planned: Plan) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in planned.tensors:
        types[tensor.type]["tensors"] += 1
        types[tensor.type]["bytes"] += tensor.nbytes
    tensors = [
        {"name": t.name, "shape": t.shape, "logical": t.logical_shape, "type": t.type, "bytes": t.nbytes}
        for t in planned.tensors
    ]
    return {
        "format": planned.format,
        "file_bytes": planned.total_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "types": dict(types),
        "tensors": tensors,
        "notes": list(planned.notes),
    }


def _tokens(recipe: Recipe, sources: Sources) -> dict[str, int]:
    """Tokens that each stage sends through the model; those of lm-eval tasks are not known beforehand."""
    tokens: Counter[str] = Counter()
    asked = recipe.activation
    if recipe.calibrate is not None:
        windows, context = _calibration_windows(recipe, sources), recipe.calibrate.context
        tokens["calibrate"] = windows * context
        if recipe.sparse and asked is not None:
            tokens["thresholds"] = min(asked.windows, windows) * context if asked.upstream == "sparse" else 0
            if asked.allocation == "global":
                tokens["thresholds"] += 2 * asked.steps * asked.batch * min(asked.length, context)
    if recipe.eval is not None:
        for text in sources.texts:
            count = len(tokenise(sources.checkpoint.tokenizer, text)) // recipe.eval.context
            windows = min(count, recipe.eval.windows or count)
            tokens["eval"] += 2 * windows * recipe.eval.context * len(recipe.protocols())  # ours and the source model
    if recipe.bench is not None:
        tokens["bench"] = recipe.bench.repetitions * (recipe.bench.prompt + 2 * recipe.bench.generate)
    if recipe.generate is not None:
        tokens["generate"] = recipe.generate.tokens
    return dict(tokens)


def _calibration_windows(recipe: Recipe, sources: Sources) -> int:
    assert recipe.calibrate is not None
    assert sources.calibration is not None
    there = len(tokenise(sources.checkpoint.tokenizer, sources.calibration)) // recipe.calibrate.context
    return min(there, recipe.calibrate.samples or there)


def _memory(recipe: Recipe, sources: Sources) -> dict[str, int]:
    """Estimates of what calibrate and eval hold at their peak, beside Python and its libraries."""
    checkpoint = sources.checkpoint
    shapes, config, size = checkpoint.source.shapes, checkpoint.config, getattr(torch, recipe.dtype).itemsize
    wide = max(sum(checkpoint.stacked_shape(site)) for site in SITES)
    memory = {}
    if recipe.calibrate is not None:
        block = sum(torch.Size(s).numel() for n, s in shapes.items() if n.startswith("model.layers.0."))
        hidden = _calibration_windows(recipe, sources) * recipe.calibrate.context * config.hidden_size * size
        # The table is stored in 16 bits at least; a block's inputs, its outputs, and these joined are there at once.
        embedding = 2 * torch.Size(shapes[EMBEDDING]).numel()
        batch = recipe.calibrate.batch * recipe.calibrate.context * wide * _LIVE * 4
        memory["calibrate"] = max(embedding + 2 * hidden, block * size + 3 * hidden + batch)
    if recipe.eval is not None:
        models = (2 if recipe.eval.perplexity else 1) * _parameters(checkpoint) * size
        logits = recipe.eval.batch * min(_CHUNK, recipe.eval.context) * config.vocab_size * 4 * _LIVE
        memory["eval"] = models + logits + recipe.eval.batch * recipe.eval.context * wide * _LIVE * 4
    return memory


def show(plan: Mapping[str, Any]) -> None:
    """Print a plan to stdout."""
    console = results()
    recipe, model = plan["recipe"], plan["model"]
    console.print(f"[bold]{escape(recipe['name'])}[/]: {escape(model['name'])}, {model['parameters']:,} parameters\n")
    console.print(_site_table(plan))
    for row in plan["patterns"]:
        found = row["sites"]
        console.print(escape(f"{row['list']} {row['pattern']}: {len(found)} sites, {found[0]} to {found[-1]}"))
    if plan["artifact"] is not None:
        artifact = plan["artifact"]
        made = table(f"artifact, {artifact['format']}", "type", ">tensors", ">bytes")
        for kind, row in artifact["types"].items():
            made.add_row(kind, str(row["tensors"]), f"{row['bytes']:,}")
        console.print(made)
        about = f"about {artifact['file_bytes']:,} bytes, {artifact['bits_per_weight']:.3f} bits per weight"
        console.print(f"file: {about}", soft_wrap=True)
        for note in artifact["notes"]:
            console.print(f"note: {escape(note)}", soft_wrap=True)
    made = table("stages", "stage", "status", ">tokens", ">peak memory, MB")
    for stage in plan["stages"]:
        name = stage["name"]
        tokens, memory = plan["tokens"].get(name), plan["peak_memory_bytes"].get(name)
        made.add_row(name, stage["status"], f"{tokens:,}" if tokens else "", f"{memory / 1e6:,.0f}" if memory else "")
    console.print(made)
    if plan["recipe"]["eval"] and plan["recipe"]["eval"]["tasks"]:
        console.print("tokens of lm-eval tasks are not counted")
    console.print("memory: weights and activations, beside Python and its libraries; dry run: nothing was written")


def _site_table(plan: Mapping[str, Any]) -> Any:
    """One row per kind of site where all layers agree in shape."""
    groups: dict[tuple[str, tuple[int, ...], int], list[float]] = defaultdict(list)
    for row in plan["sites"]:
        groups[row["site"].rpartition(".")[2], tuple(row["shape"]), row["padding_rows"]].append(row["sparsity"])
    activation = plan["recipe"]["activation"] or {}
    on_average = " on average" if activation.get("allocation") in ("teal", "global") else ""
    made = table("sites", "site", ">rows", ">columns", ">padding rows", ">layers", ">sparse in", "target sparsity")
    for (site, (rows, columns), padding), targets in groups.items():
        sparse = [target for target in targets if target]
        target = f"{sparse[0]:g}{on_average}" if sparse else "dense"
        made.add_row(site, str(rows), str(columns), str(padding), str(len(targets)), str(len(sparse)), target)
    return made
