"""The folder of planes: the weights of zigzag-q6_p by Linears, for programs that load a model by the names of those.

Of each Linear of the blocks, in place of its `weight` [rows, columns] (`formats.orders.planes`):

    NAME.weight             [pieces, columns, 50]   U8: pieces of 64 rows of a column, in planes
    NAME.weight_scale       [rows]                  F32: what each row is multiplied by
    NAME.weight_threshold   [columns]               F32: at which level a decoded token reads column j: at as many as
    NAME.weight_steps       [levels]                F32: there are l with |x[j]| > steps[l] * threshold[j]

Everything else is the checkpoint's, in its own type. The Linears of a site have the same threshold and steps; those of
a dense site zeros, and in place of infinity, which no tensor of a folder may hold, stands the largest float32. A site's
rows are quantised together, so that bits and losses are those of the file in zigzag order, and a Linear that others of
its site follow has whole pieces: its rows are a multiple of 64.

config.json says in `quantization_config` which `linears` these are, the bits of a weight that readers of one plane, of
two, ... know (`levels`), and that `thresholds` are multiplied by "steps"; with `attention` true the manifest has sparse
attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.stored import shown
from sparsepack.files.transfer import tensors_at_once
from sparsepack.formats.artifact import Artifact, Program
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.safetensors import CONFIG, ArtifactFolder
from sparsepack.formats.containers.safetensors_writer import FolderPlan
from sparsepack.formats.linear_folder import (
    SCALE,
    LinearFolderArtifact,
    Stored,
    as_bytes,
    block_linears,
    folder_plan,
    own_tensors,
    refuse_unknown,
)
from sparsepack.formats.orders import planes
from sparsepack.formats.plan import EncodedSite, PlannedGroup, PlannedTensor, PlanRequest, SiteEncoder
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import Format
from sparsepack.models.activity import sparse_sites_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.found import family_of_config
from sparsepack.models.sites import Rules, SiteKey, SiteRule
from sparsepack.reconstruction import Inputs

THRESHOLD, STEPS = "_threshold", "_steps"
"""The names of a weight's threshold and steps end so, after the name of the weight."""

BLOCK = "Q6_P"
LEVELS = BLOCKS[BLOCK].levels
_RULE = "steps"
_NEVER = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Planes:
    """How a Linear is stored: the bits of a weight that readers of its first plane, of two, ... know."""

    levels: tuple[int, ...] = LEVELS


def linears_of(section: Mapping[str, Any]) -> dict[str, Planes]:
    """How each Linear is stored, by a folder's `quantization_config` (`linear_folder.configured_linears`)."""
    refuse_unknown(section, ("linears", "levels", "thresholds"))
    for name, known in (("levels", list(LEVELS)), ("thresholds", _RULE)):
        if (found := section.get(name)) != known:
            raise ArtifactError(
                f"quantization_config.{name}: {str(found)[:60]}, this version of sparsepack knows {known}; "
                "update sparsepack"
            )
    names = section.get("linears")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ArtifactError("quantization_config.linears: expected a list of names; pack the model again")
    return dict.fromkeys(names, Planes())


def planes_tensors(weight: str, rows: int, columns: int) -> Stored:
    """The tensors of a Linear with planes in the order in which they are stored: name -> shape and type."""
    return {
        weight: ((planes.pieces(rows), columns, planes.PIECE_BYTES), "U8"),
        weight + SCALE: ((rows,), "F32"),
        weight + THRESHOLD: ((columns,), "F32"),
        weight + STEPS: ((len(LEVELS),), "F32"),
    }


def stored_rule(rule: SiteRule | None, columns: int) -> tuple[Tensor, Tensor]:
    """Threshold and steps of a site as they are stored: float32 [columns] and [levels]. A rule without steps, which
    reads a column whole or not at all, has the same step for each level; a dense site has zeros."""
    if rule is None or rule.dense:
        return torch.zeros(columns), torch.zeros(len(LEVELS))
    threshold = rule.unit.detach().float().cpu().expand(columns)
    steps = torch.ones(len(LEVELS)) if rule.steps is None else rule.steps.detach().float().cpu()
    return threshold.clamp(max=_NEVER), steps.clamp(max=_NEVER)


def read_rule(threshold: Tensor, steps: Tensor) -> SiteRule:
    """The rule of a site from its threshold and steps as they are stored."""
    threshold, steps = (torch.where(each == _NEVER, torch.inf, each) for each in (threshold, steps))
    return SiteRule(threshold, steps=steps)


@dataclass(frozen=True)
class PlanesArtifact(LinearFolderArtifact):
    """A folder of planes."""

    row_scale: ClassVar[str] = f".weight{SCALE}"
    behind: ClassVar[tuple[str, ...]] = (SCALE, THRESHOLD, STEPS)

    def stored_tensors(self, name: str) -> Stored:
        return planes_tensors(f"{name}.weight", *self.logical_shape(f"{name}.weight"))

    def type_of_weights(self, name: str) -> str:
        return BLOCK if self.how_stored(name) else super().type_of_weights(name)

    def check_shapes(self) -> None:
        super().check_shapes()
        _ = self.rules

    @cached_property
    def rules(self) -> Rules:
        """The rules of the sites that have one. Raises `ArtifactError` where Linears of a site have others."""
        found: dict[SiteKey, SiteRule] = {}
        for key, names in self._sites.items():
            threshold, steps = self._rule(names[0])
            for other in names[1:]:
                if not all(map(torch.equal, self._rule(other), (threshold, steps))):
                    raise ArtifactError(f"{self.path}: {other} has other thresholds than {names[0]}; pack it again")
            if not (steps[1:] >= steps[:-1]).all() or bool((threshold < 0).any() or (steps < 0).any()):
                raise ArtifactError(f"{self.path}: {names[0]}: thresholds fall or are below zero; pack it again")
            if threshold.any() or steps.any():
                found[key] = read_rule(threshold, steps)
        return found

    @cached_property
    def _sites(self) -> dict[SiteKey, list[str]]:
        """The Linears of each site, as they are stacked."""
        try:
            config = self._config()
            family = family_of_config(config)
            sites = {
                (layer, site): [f"{family.block(layer)}.{name}" for name in names]
                for layer in range(int(config.num_hidden_layers))
                for site, names in family.at(config, layer).projections.items()
            }
        except Exception as error:  # transformers checks fields in several ways, each with its own kind
            raise ArtifactError(f"{self.path / CONFIG}: not understood ({shown(error)}); pack it again") from error
        return {key: names for key, names in sites.items() if names[0] in self.linears}

    def _rule(self, name: str) -> tuple[Tensor, Tensor]:
        threshold, steps = (self.stored(f"{name}.weight{part}") for part in (THRESHOLD, STEPS))
        return threshold.view(torch.float32).flatten(), steps.view(torch.float32).flatten()

    @property
    def sparse_sites(self) -> int:
        return len(self.rules)

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        if self.how_stored(name) is None:
            return super().decoded(name, first, last)
        return self._at_level(name, len(LEVELS), first, last)

    def _at_level(self, name: str, level: int, first: int = 0, last: int | None = None) -> Tensor:
        rows, columns = self.logical_shape(name)
        last = rows if last is None else min(last, rows)
        top, end = first // planes.PIECE_ROWS, planes.pieces(last)
        stored = self.stored(name, top, end).view(end - top, columns, -1)
        top *= planes.PIECE_ROWS
        weight = planes.decode(stored, min(rows, end * planes.PIECE_ROWS) - top, level)[first - top : last - top]
        return weight * self.stored(name + SCALE, first, last).view(torch.float32)

    def stock(self) -> StockModel:
        table = self.manifest.get("thresholds") or {}
        rules = self.rules
        return replace(
            super().stock(),
            rules=rules,
            sparsity=float(table.get("sparsity") or 0.0),
            sparse_sites=sparse_sites_of(self.manifest, rules),
            of_levels=self._of_levels if rules else None,
        )

    def _of_levels(
        self, layer: int, site: str, expert: int | None, device: torch.device
    ) -> tuple[Sequence[Tensor], Sequence[int]]:
        names = [f"{name}.weight" for name in self._sites[layer, site]]
        lower = [torch.cat([self._at_level(name, n) for name in names]).to(device) for n in range(1, len(LEVELS))]
        return lower, BLOCKS[BLOCK].level_bytes

    def programs(self) -> Iterator[Program]:
        yield from super().programs()
        yield Program("vLLM", True, "on CPUs, with sparsepack installed")

    def padding_problems(self) -> Iterator[str]:
        from sparsepack.formats.zigzag.artifact import rows_problem  # which reads GGUF: not for transformers and vLLM

        for name in (f"{linear}.weight" for linear in self.linears):
            rows, columns = self.logical_shape(name)
            if held := rows % planes.PIECE_ROWS:
                last = self.stored(name, planes.pieces(rows) - 1).view(1, columns, -1)
                problem = rows_problem(BLOCK, rows, held, planes.decode(last, planes.PIECE_ROWS))
                if problem:
                    yield f"{self.path}: {name}: {problem}; pack it again"


AT_ONCE = 4
"""This many sites are encoded side by side for a CUDA device."""


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model of a family that no format holds, `PackingError` where pieces would have rows
    of two Linears."""
    check_taken("pack", checkpoint.family, checkpoint.name)
    for names in block_linears(checkpoint).values():
        shapes = {name: checkpoint.source.shapes.get(f"{name}.weight", ()) for name in names}
        for name, shape in shapes.items():
            if len(shape) != 2:
                raise PackingError(f"{name}: no Linear with a matrix, for which {format.name} has no place")
            if name != names[-1] and shape[0] % planes.PIECE_ROWS:
                raise PackingError(
                    f"{name}: {shape[0]} rows, {format.name} needs a multiple of {planes.PIECE_ROWS} where another "
                    "Linear follows; pack as zigzag-q6_p"
                )


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> FolderPlan:
    """A model as a folder of planes. Writing it holds the matrix of one site in memory, a CUDA device some.

    Raises `PackingError` for rules that do not fit the model or the format.
    """
    from sparsepack.formats.zigzag.plan import check_levels, check_rules

    check_rules(checkpoint, request.rules)
    for (layer, site), rule in request.rules.items():
        check_levels(f"blk.{layer}.{site}", rule, len(LEVELS))
        if rule.offset is not None:
            raise PackingError(f"blk.{layer}.{site}: offsets, for which {format.name} has no place; find them without")
    sites = block_linears(checkpoint)
    linears = [name for names in sites.values() for name in names]
    groups = [*own_tensors(checkpoint, dict.fromkeys(linears)), *_groups(checkpoint, sites, request)]
    section = {"linears": linears, "levels": list(LEVELS), "thresholds": _RULE}
    at_once = tensors_at_once(request.device, AT_ONCE)
    return folder_plan(format, checkpoint, request, groups, section, at_once=at_once, row_scales=True)


def _groups(
    checkpoint: Checkpoint, sites: Mapping[SiteKey, Sequence[str]], request: PlanRequest
) -> Iterator[PlannedGroup]:
    """The Linears of each site, encoded together."""
    from sparsepack.formats.zigzag.plan import rounded_site

    def produce(layer: int, site: str, rows: Mapping[str, slice]) -> Sequence[Tensor]:
        columns = checkpoint.stacked_shape(site, layer)[1]
        rule = [as_bytes(part) for part in stored_rule(request.rules.get((layer, site)), columns)]
        if next(iter(rows)) in request.encoded:
            weights = {part: give() for name in rows for part, give in _of(request, name)}
        else:
            blocks, tail, scales = rounded_site(checkpoint, layer, site, BLOCK, request)
            assert scales is not None
            weights = _apart(planes.from_zigzag(blocks, tail, len(scales)), scales, rows)
        return [part for name in rows for part in (weights[name], weights[name + SCALE], *rule)]

    for (layer, site), names in sites.items():
        rows = _rows(checkpoint, names)
        tensors = []
        for name, part in rows.items():
            held, columns = part.stop - part.start, checkpoint.source.shapes[name][1]
            for stored, (shape, type) in planes_tensors(name, held, columns).items():
                weights, padding = stored == name, -held % planes.PIECE_ROWS if stored == name else 0
                logical = (held, columns) if weights else None
                tensors.append(PlannedTensor(stored, shape, type, logical, weights, padding))
        yield PlannedGroup(tuple(tensors), partial(produce, layer, site, rows))


def _of(request: PlanRequest, name: str) -> Iterator[tuple[str, Any]]:
    return ((part, request.encoded[part]) for part in (name, name + SCALE))


def _rows(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, slice]:
    """The rows of each weight of a site in the site's matrix."""
    found, start = {}, 0
    for name in names:
        rows = checkpoint.source.shapes[f"{name}.weight"][0]
        found[f"{name}.weight"] = slice(start, start + rows)
        start += rows
    return found


def _apart(stored: Tensor, scales: Tensor, rows: Mapping[str, slice]) -> dict[str, Tensor]:
    """The pieces and the scales of each weight of a site: uint8."""
    found = {}
    for name, part in rows.items():
        found[name] = stored[part.start // planes.PIECE_ROWS : planes.pieces(part.stop)]
        found[name + SCALE] = as_bytes(scales[part])
    return found


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`): as in zigzag order, then taken apart."""
    from sparsepack.formats.zigzag.plan import encoded_site
    from sparsepack.formats.zigzag.reader import ROW_SCALE, TAIL, WEIGHT

    sites = block_linears(checkpoint)

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        encoded, rows, name = encoded_site(BLOCK, layer, site, weight, inputs), len(weight), f"blk.{layer}.{site}"
        tail, scales = encoded.tensors.get(name + TAIL), encoded.tensors[name + ROW_SCALE].view(torch.float32).flatten()
        empty = torch.empty(0, weight.shape[1], BLOCKS[BLOCK].bytes, dtype=torch.uint8, device=weight.device)
        stored = planes.from_zigzag(encoded.tensors.get(name + WEIGHT, empty), tail, rows)
        of_linears = _rows(checkpoint, sites[layer, site])
        return EncodedSite(_apart(stored, scales, of_linears), encoded.weight, of_linears)

    return encode


def opened(folder: ArtifactFolder, manifest: Mapping[str, Any]) -> Artifact:
    """A folder of planes that has been opened. Raises `ArtifactError` where it does not hold together."""
    artifact = PlanesArtifact(manifest, folder)
    artifact.check_shapes()
    return artifact
