"""`--dry-run`: what a recipe would make and cost, without running the model."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepack import tables
from sparsepack.calibrate.thresholds import ALLOCATIONS
from sparsepack.models.hf_model.forecast import model_parameters
from sparsepack.models.sites import chosen_sites, site_name
from sparsepack.process import peak_memory
from sparsepack.recipe.section import PATH, Recipe
from sparsepack.recipe.sections import ActivationSparsity, sparse
from sparsepack.recipe.stage import Job, Stage
from sparsepack.recipe.stages import STAGES
from sparsepack.tables import Table

WORKING = 70_000_000
"""Torch takes this many bytes for itself as soon as it works: threads, their buffers, matrices in the order it
likes."""


def process_bytes(job: Job) -> int:
    """What a process takes besides a stage's own tensors; 0 on other devices than the CPU, whose memory is reckoned.

    That is Python, libraries and the tokenizer, all of which this process has by now, and what torch needs to work.
    """
    return WORKING + peak_memory() if job.recipe.device == "cpu" else 0


def make_plan(job: Job, stages: Sequence[Stage], pending: Collection[str]) -> dict[str, Any]:
    """The plan, JSON-able. `pending`: names of the stages that would run."""
    checkpoint = job.checkpoint
    plan: dict[str, Any] = {
        "kind": "recipe plan",
        "recipe": job.recipe.to_json(),
        "model": {"name": checkpoint.name, "sha256": checkpoint.sha256, "parameters": model_parameters(checkpoint)},
        "paths": {"working directory": str(Path.cwd()), "work": str(job.folder.resolve()), **_paths(job.recipe)},
        "stages": [{"name": s.name, "status": "would run" if s.name in pending else "up to date"} for s in stages],
    }
    tokens, memory = {}, {}
    seen = job  # by the next stage, with the model that will have been made
    for stage in STAGES:
        section = job.recipe.section(stage.key)
        plan |= stage.plan(seen, section)
        if stage in stages:
            cost = stage.cost(seen, section)
            tokens[stage.name], memory[stage.name] = cost.tokens, cost.memory
        seen = seen.ahead_of(stage)
    plan["sites"] = _sites(job, plan["artifact"], plan["pruned"])
    plan["tokens"] = {name: count for name, count in tokens.items() if count is not None}
    plan["process_bytes"] = process_bytes(job)
    plan["peak_memory_bytes"] = {
        name: plan["process_bytes"] + count for name, count in memory.items() if count is not None
    }
    return plan


def _paths(recipe: Recipe) -> dict[str, str]:
    """Every path of a recipe by its key, as it is understood; a name that is no path here is said to be one."""
    found = {}
    for place, section in (("", recipe), *((key, recipe.section(key)) for key in type(recipe).model_fields)):
        for name, field in getattr(type(section), "model_fields", {}).items():
            values = getattr(section, name) if PATH in field.metadata else ()
            for value in (values,) if isinstance(values, str) else values or ():
                there = Path(value).resolve()
                key = ".".join(filter(None, (place, name)))
                found[f"{key} {value}"] = str(there) if there.exists() else "taken as a name: there is no such path"
    return found


def _sites(job: Job, artifact: Mapping[str, Any] | None, pruned: Mapping[str, str]) -> list[dict[str, Any]]:
    recipe, checkpoint = job.recipe, job.checkpoint
    section = ActivationSparsity.find_in(recipe)
    skipping = (
        set(chosen_sites(checkpoint.sites, section.include, section.ignore)) if section and sparse(recipe) else set()
    )
    padded: dict[str, int] = defaultdict(int)
    for tensor in artifact["tensors"] if artifact else ():
        experts = math.prod(tensor["logical"][:-2])
        padded[".".join(tensor["name"].split(".")[:3])] += experts * tensor["padding_rows"]
    rows = []
    for layer in range(checkpoint.layers):
        for site in checkpoint.family.projections_of(layer):
            shape, name = checkpoint.stacked_shape(site, layer), site_name(layer, site)
            target = section.sparsity if section is not None and (layer, site) in skipping else 0.0
            row = {"site": name, "shape": list(shape), "padding_rows": padded[name], "sparsity": target}
            rows.append({**row, "keeps": pruned.get(name)})
    return rows


def show(plan: Mapping[str, Any]) -> None:
    """Print a plan to stdout."""
    recipe, model = plan["recipe"], plan["model"]
    named = (tables.Styled(recipe["name"], "heading"), f": {model['name']}, {model['parameters']:,} parameters\n")
    paths = "paths (relative ones start at the working directory)"
    tables.show([named, Table(["what", "where"], list(plan["paths"].items()), paths), _site_table(plan)])
    for stage in STAGES:
        tables.show(stage.show_plan(plan))
    rows = []
    for row in plan["stages"]:
        tokens, memory = (plan[key].get(row["name"]) for key in ("tokens", "peak_memory_bytes"))
        counts = (f"{tokens:,}" if tokens else "", f"{memory / 1e6:,.0f}" if memory else "")
        rows.append([row["name"], row["status"], *counts])
    what = "of the whole process, Python and its libraries included" if plan["process_bytes"] else "of the device"
    memory = f"memory: {what}, within about a quarter; dry run: nothing was written"
    tables.show([Table(["stage", "status", "tokens", "peak memory, MB"], rows, "stages", [memory])])


def _site_table(plan: Mapping[str, Any]) -> Table:
    """One row per kind of site where all layers agree in shape."""
    groups: dict[tuple[str, tuple[int, ...], int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in plan["sites"]:
        groups[row["site"].rpartition(".")[2], tuple(row["shape"]), row["padding_rows"]].append(row)
    section = plan["recipe"][ActivationSparsity.key]
    on_average = " on average" if section and not ALLOCATIONS[section["allocation"]].even else ""
    made = []
    for (site, (rows, columns), padding), of_kind in groups.items():
        skipping = [row["sparsity"] for row in of_kind if row["sparsity"]]
        target = f"{skipping[0]:g}{on_average}" if skipping else "dense"
        kept = ", ".join(dict.fromkeys(row["keeps"] or "all" for row in of_kind))
        made.append([site, rows, columns, padding, len(of_kind), kept, len(skipping), target])
    names = ["site", "rows", "columns", "padding rows", "layers", "weights kept", "sparse in", "target sparsity"]
    return Table(names, made, "sites")
