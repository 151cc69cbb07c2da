"""How many bits of a weight sequences read that are decoded together with planes, and what they lose.

A step of several sequences reads a column once for all of them, at one level. Reading column j at level l leaves
sequence t the error x_tj^2 e_lj (`sparsepack.calibrate.planes`), and thresholds on |x_j| weigh it against bits at one
price. Over sequences errors add up, while bits are paid once: the best level depends on the sum over t of x_tj^2 alone.

    largest  the thresholds of one sequence on max |x_tj|, as engines do: each has the levels that it has alone, or more
    sum      on the root of the sum of x_tj^2: the price of a bit is that of one sequence, though all share it
    mean     on the root of the mean of x_tj^2: the price of a bit grows with the number of sequences n
    scaled   n^0.3 times the thresholds of one sequence on max |x_tj|: about the bits of `mean`, found by trial

`mean` reads less than `largest`, `sum` more. The error left at the best level is concave in x^2, so that by `mean`
sequences lose as much as each would alone or a little more, and by `sum` less. What takes the loss of one sequence lies
between, on the line through both of bits and the logarithm of KL: the last column, empty where `mean` loses less.

Windows: `samples` of one chat prompt at temperature 1 by the float model (a model without a chat template continues a
paragraph), and `strangers`, spread over WikiText and books, in turns. Groups are of rows in their order, so that every
number of sequences decodes the same tokens. Protocol decode: the context is read dense, and at each token behind it
columns have the level of their group. KL and perplexity are against the float model. Models are rescaled and packed as
by `small_models`, in its work folder. Bits are of planes with their scales; scales of rows and thresholds of columns,
0.05 bit and read once for a batch, are not counted.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor

from benchmarks.shared import machine
from benchmarks.shared.evaluation import BOOKS_TEXT, CALIBRATION_TEXT, WIKITEXT, Windows
from benchmarks.shared.timing import json_option, write_figures
from benchmarks.small_models import (
    ROWS,
    Remembered,
    Row,
    bits_at,
    file_of,
    lost,
    model_files,
    packed_rows,
    prepare,
    with_float_output,
)
from sparsepack.eval import scorer as eval_scorer
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.protocols import Done, ignored
from sparsepack.eval.scorer import SparsePositions, SparseScorer
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.files.text import read_text
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.model import backbone_of
from sparsepack.models.sites import SiteKey, levels_read
from sparsepack.models.tokenizer.chat import render_chat
from sparsepack.models.tokenizer.windows import inputs_and_targets, rolling_windows
from sparsepack.tables import Table, markdown

CHOICES = ("largest", "sum", "mean", "scaled")
BITS = [f"{row.bits:g}" for row in ROWS if row.bits]
KINDS = ("samples", "strangers")
CHAT = "Explain how a sailing ship found its way across the ocean two hundred years ago, and what could go wrong."
PARAGRAPH = "Two hundred years ago a sailing ship found its way across the ocean by the sun, the stars and a clock. "


def group_size(x: Tensor, sequences: int, choice: str) -> Tensor:
    """Return what is compared with thresholds, of inputs x [rows, positions, columns] of which so many rows are decoded
    together: float32, of the shape of x, the same for all rows of a group.

    choice -- of `CHOICES`, or "all": what exceeds every threshold
    """
    if choice == "all":
        return torch.full_like(x, torch.inf, dtype=torch.float32)
    groups = x.float().view(-1, sequences, *x.shape[1:])
    if choice in ("largest", "scaled"):
        size = groups.abs().amax(1, keepdim=True) / (sequences**0.3 if choice == "scaled" else 1)
    else:
        total = groups.square().sum(1, keepdim=True)
        size = (total / sequences if choice == "mean" else total).sqrt()
    return size.expand_as(groups).reshape(x.shape)


class _Counted(SparsePositions):
    """Counts at which levels columns were read: of each site int64 [1 + levels], of which level 0 is not at all."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.columns: dict[SiteKey, Tensor] = {}

    def _count_levels(self, key: SiteKey, levels: Tensor, ends: Sequence[int], counted: Tensor) -> None:
        found = torch.bincount(levels[counted].flatten().long(), minlength=1 + len(ends)).cpu()
        self.columns[key] = self.columns.get(key, 0) + found


class GroupScorer(SparseScorer):
    """Decodes tokens behind `contexts`, int64 [rows, positions], which are read dense once. Groups of `sequences` rows
    are decoded together, each column at the level that `choice` says of a group."""

    def __init__(self, subject: TransformersSubject, contexts: Tensor) -> None:
        super().__init__(subject.model, subject.family, subject.rules, subject.context)
        levels = eval_scorer._kept(subject.of_levels, None)
        self._positions = self._counted = _Counted(subject.family, subject.rules, self.device, levels)
        self.subject, self.sequences, self.choice = subject, 1, "largest"
        self.read(contexts)

    @torch.inference_mode()
    def read(self, contexts: Tensor) -> None:
        """Put other contexts in the place of those before."""
        self._past = self.model.base_model(contexts.to(self.device), use_cache=True).past_key_values

    def _levels(self, x: Tensor, limits: Tensor) -> Tensor:
        return levels_read(group_size(x, self.sequences, self.choice), limits)

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: Tensor,
        lengths: Tensor | None,
        sparse_from: Tensor,
        batch: int | None = None,
        done: Done = ignored,
        scored_from: Tensor | None = None,
    ) -> Tensor:
        """What enters the output matrix, [B, S, H]."""
        blocks, ids = list(enumerate(backbone_of(self.model).layers)), input_ids.to(self.device)
        with (
            patch.object(eval_scorer, "levels_read", self._levels),
            self._positions.within(blocks, ids.shape[1], lengths, sparse_from),
        ):
            output = self.model.base_model(ids, past_key_values=copy.deepcopy(self._past), use_cache=True)
        found: Tensor = output.last_hidden_state
        return found

    def loss(self, windows: Windows, reference: Remembered) -> dict[str, Any]:
        """Return what is lost, as `summarise` has it, of tokens that follow the contexts."""
        with torch.inference_mode():
            scores = score_windows(self, *windows, "all", reference, batch=len(windows[0]))
        return summarise(scores, 1)

    def measure(self, windows: Windows, reference: Remembered, sequences: int, choice: str) -> dict[str, Any]:
        """Return bits read and shares of columns at each level, both overall and by site, and what is lost."""
        self.sequences, self.choice = sequences, choice
        self._counted.columns.clear()
        lost = self.loss(windows, reference)
        shares = level_shares(self._counted.columns, self.subject.parameters())
        bits = {site: bits_read(share, self.subject.weights) for site, share in shares.items()}
        return {"sequences": sequences, "choice": choice, "bits": bits, "columns": shares, **lost}


def level_shares(columns: Mapping[SiteKey, Tensor], parameters: Mapping[SiteKey, int]) -> dict[str, list[float]]:
    """Return the share of columns, each by its weights, that was read at each level: of all sites, and of each."""
    found: dict[str, list[float]] = {}
    for name in ("overall", *SITES):
        keys = [key for key in columns if name in ("overall", key[1])]
        total = sum(parameters[key] for key in keys)
        shares = torch.stack([columns[key] / columns[key].sum() * parameters[key] / total for key in keys])
        found[name] = shares.sum(0).tolist()
    return found


def bits_read(shares: Sequence[float], block: str) -> float:
    """Return the bits of a weight that are read where columns are read at each level so often."""
    packed = BLOCKS[block]
    return sum(share * 8 * end / packed.weights for share, end in zip(shares, (0, *packed.level_bytes), strict=True))


@torch.inference_mode()
def sample(subject: TransformersSubject, count: int, context: int, tokens: int) -> Windows:
    """Return windows that begin with one prompt and go on as the model does at temperature 1, without an end token."""
    tokenizer = subject.tokenizer
    if tokenizer.chat_template:
        message = [{"role": "user", "content": CHAT}]
        prompt = render_chat(tokenizer.chat_template, message, **tokenizer.special_tokens_map)
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    else:
        ids = torch.tensor([tokenizer.encode(PARAGRAPH, add_special_tokens=False)])
        ids = inputs_and_targets(tokenizer, torch.cat([ids, ids[:, :1]], 1))[0]
    if ids.shape[1] > context:
        raise click.UsageError(f"--context {context}: the prompt has {ids.shape[1]} tokens")
    torch.manual_seed(0)
    sampled: Tensor = subject.model.generate(
        ids.to(subject.device),
        attention_mask=torch.ones_like(ids).to(subject.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=count,
        min_length=context + tokens + 1,
        max_length=context + tokens + 1,
    ).cpu()
    return sampled[:, :-1], sampled[:, 1:]


def windows_of_kind(subject: TransformersSubject, kind: str, count: int, context: int, tokens: int) -> Windows:
    """Return windows of a kind that the module describes: inputs and targets, int64 [count, context + tokens]."""
    if kind == "samples":
        return sample(subject, count, context, tokens)
    parts = []
    for text in (BOOKS_TEXT, WIKITEXT):
        windows = rolling_windows(subject.tokenizer, read_text(text), context + tokens)
        chosen = torch.linspace(len(windows[0]) // 2, len(windows[0]) - 1, -(-count // 2)).long()
        parts.append([each[chosen] for each in windows])
    inputs, targets = (torch.stack(each, 1).flatten(0, 1)[:count] for each in zip(*parts, strict=True))
    return inputs, targets


def measure_all(
    scorer: GroupScorer, windows: Windows, reference: Remembered, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Return `GroupScorer.measure` of all bits, of one sequence, and of each number of them by each choice."""
    runs = [(1, "all"), (1, "largest"), *((count, choice) for count in counts if count > 1 for choice in CHOICES)]
    return [scorer.measure(windows, reference, *run) for run in runs]


def detailed(figures: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each number of sequences and choice: bits of each site, and columns at each level."""
    rows = []
    for each in figures:
        bits, shares = each["bits"], each["columns"]["overall"]
        of_sites = [f"{bits[name]:.2f}" for name in ("overall", *SITES)]
        rows.append([f"{each['sequences']}, {each['choice']}", of_sites[0], lost(each), *of_sites[1:]])
        rows[-1].append(" / ".join(f"{100 * share:.0f}" for share in shares))
    first = figures[0]
    title = f"{first['model']}, {first['row']}, {first['kind']}"
    return Table(["sequences, level by", "read", "loss, KL", *SITES, "% of columns at levels 0 to 5"], rows, title)


def summary(figures: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each number of sequences of each kind: bits and KL by each choice, and bits at the KL of one."""
    rows = []
    for kind in dict.fromkeys(each["kind"] for each in figures):
        found = {(each["sequences"], each["choice"]): each for each in figures if each["kind"] == kind}
        one = found[1, "largest"]["kl_divergence"]["value"]
        for count in dict.fromkeys(count for count, _ in found):
            of_count = {choice: found.get((count, choice), found[1, "largest"]) for choice in CHOICES}
            points = {
                name: (each["bits"]["overall"], each["kl_divergence"]["value"]) for name, each in of_count.items()
            }
            at = bits_at([points["mean"], points["sum"]], one)
            cells = [f"{bits:.2f}, {kl:.4f}" for bits, kl in points.values()]
            rows.append([kind, str(count), *cells, "" if at is None else f"{at:.2f}"])
    first = figures[0]
    title = f"{first['model']}, {first['row']}: bits read, KL"
    return Table(["windows", "sequences", *CHOICES, "sum, at the KL of one"], rows, title)


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--bits", type=click.Choice(BITS), multiple=True, default=("3.4", "2.8"), help="That one sequence reads.")
@click.option("--sequences", type=int, multiple=True, default=(2, 4, 8, 16, 32), show_default=True)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True)
@click.option("--windows", "count", default=32, show_default=True, help="A multiple of every number of sequences.")
@click.option("--context", default=96, show_default=True, help="Tokens read dense, of samples with the prompt.")
@click.option("--tokens", default=32, show_default=True, help="Decoded of each window.")
@click.option("--work", default="/tmp/sparsepack-real-models", type=click.Path(path_type=Path), show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True)
@json_option
def main(
    models: tuple[Path, ...],
    bits: tuple[str, ...],
    sequences: tuple[int, ...],
    kinds: tuple[str, ...],
    count: int,
    context: int,
    tokens: int,
    work: Path,
    device: str,
    threads: int,
    json_path: Path | None,
) -> None:
    """Print a table for each model, number of bits and kind of windows, and one of all kinds."""
    if uneven := [each for each in sequences if each < 1 or count % each]:
        raise click.UsageError(f"--sequences {uneven[0]}: expected a divisor of --windows {count}")
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    click.echo(machine.setting_line(machine.setting()))
    figures: list[dict[str, Any]] = []
    for model in model_files(models, work):
        rescaled, calibration, files = prepare(model, work, CALIBRATION_TEXT, 16, device)
        reference = open_subject(str(rescaled), None, device, "float32")
        data = {kind: windows_of_kind(reference, kind, count, context, tokens) for kind in kinds}
        contexts = {kind: inputs[:, :context] for kind, (inputs, _) in data.items()}
        dense = {kind: Remembered(GroupScorer(reference, ids)) for kind, ids in contexts.items()}
        decoded = {kind: (inputs[:, context:], targets[:, context:]) for kind, (inputs, targets) in data.items()}

        whole, of_bits = Row("zigzag-q4_k"), [Row("zigzag-q6_p", bits=float(number)) for number in bits]
        missing = [row.name for row in (whole, *of_bits) if not file_of(files, row.name).exists()]
        for packed in packed_rows(rescaled, calibration, reference, files, missing):
            click.echo(f"packed {packed.path}")
        scorer = GroupScorer(with_float_output(file_of(files, whole.name), reference), contexts[kinds[0]])
        for kind, windows in decoded.items():
            scorer.read(contexts[kind])
            figures.append({"model": model.stem, "row": whole.name, "kind": kind, **scorer.loss(windows, dense[kind])})
            click.echo(f"{model.stem}, {kind}: {whole.name}, every column read: {lost(figures[-1])}")
        for row in of_bits:
            of_file: list[dict[str, Any]] = []
            scorer = GroupScorer(with_float_output(file_of(files, row.name), reference), contexts[kinds[0]])
            for kind, windows in decoded.items():
                scorer.read(contexts[kind])
                facts = {"model": model.stem, "row": row.name, "kind": kind}
                found = [{**facts, **each} for each in measure_all(scorer, windows, dense[kind], sequences)]
                click.echo(f"\n{markdown(detailed(found))}")
                of_file += found
            click.echo(f"\n{markdown(summary(of_file))}")
            figures += of_file
            write_figures(json_path, figures)
