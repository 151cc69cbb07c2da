"""Gates that the card has no room for: what copies in few bits find, what they lose, and how fast that would be.

    python benchmarks/gate_copy.py m.gguf [--model MODEL --calibration-text CAL --text TEXT]

m.gguf is of the format neuron-q4_k, made from MODEL; without options that is books-26m-relu, with its texts from
SPARSEPACK_SHARED. Tables:

- of kinds of copies, made from the file's gates in 4.5 bits or from the checkpoint's, how many of those that are
  active by the file's gates are among the 1.5 times as many that score best; thresholds of a block are of the
  calibration text. Q2_K and TQ2_0 are ggml's; in zigzag order a superblock has the weights of 256 neurons and a column.
- tokens a second of a 70B shape by the model of time, for budgets of the GPU's memory, slots given out by frequency:

    gates near    all gates on the GPU, slots in the rest; it needs 19.5 GB
    gates far     as many gates on the GPU as fit, the others read from host memory, by the bus alone or by both sides
    copy, bus     copies on the GPU, for as many blocks as fit; the numbers of a listed neuron's gate come over the bus
                  where it has no slot (`codecs/gate_rows.py`), and what the rows share is on the GPU. A slot holds the
                  numbers, too. The gates of other blocks are far, and both sides read them
    copy, Q4_K    the same with gates in Q4_K by rows, as a file could have them: rows share nothing, and each side
                  reads the gates of those listed neurons that it would compute
    copy, Q6_K    the same with gates that are quantised again, in Q6_K by rows, when the file is loaded

- what the file loses where its gates are quantised again, by rows; and where neurons are listed by a copy and its
  limits, and computed exactly if they are listed: in the second halves of windows (protocol `decode`), beside the file
  with all neurons.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from accuracy_windows import Windows, windows_of
from books import books_options
from figures import json_option, write_figures
from gate_predictors import thresholds
from torch import Tensor

from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.protocols import scored_from
from sparsepack.eval.scorer import SparseScorer
from sparsepack.eval.standard_error import with_error
from sparsepack.eval.subject import StockSubject, open_subject
from sparsepack.formats.codecs import neurons as records
from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.gate_rows import copied, limits
from sparsepack.formats.codecs.matrices import decode_matrix, decode_rows, encode_rows
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.models.family import MLP_MID
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import (
    MACHINES,
    SHAPES,
    Listed,
    Machine,
    Shape,
    TokenSeconds,
    dense_split,
    seconds_per_token,
)
from sparsepack.placement.placement import across_blocks, budget_of
from sparsepack.runtime.reference.neurons import ReferenceCopy, load_gate_copy, may_be_active
from sparsepack.tables import Table, markdown

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ggml

MLP_IN = "mlp_in"
SINKS = 4
LISTED = 1.5
BUDGETS = (12, 14, 16, 18, 20, 24)
TABLE_BITS = 2 * 8 / 32 + 2 * 16 / 256
"""Bits a weight of what the rows of a gate by neuron share."""

Key = tuple[int, float]
"""Bits of a copy, and how many times as many neurons as are active are asked for."""


def blocks_of(packed: PackedModel) -> list[tuple[Tensor, Tensor]]:
    """Of each block the gate, float32 [neurons, hidden], and the frequencies, [neurons], in the model's order."""
    found = []
    for layer in packed.layers:
        assert isinstance(layer.mlp, NeuronMlp), "expected a file of the format neuron-q4_k"
        stored_at = records.original_order(layer.mlp.order)
        found.append((decode_matrix(layer.mlp.gate)[stored_at], layer.mlp.frequency[stored_at]))
    return found


@torch.inference_mode()
def inputs_of(subject: StockSubject, windows: Tensor) -> list[Tensor]:
    """What enters the MLP of each block over windows, without their first positions: float32 [tokens, hidden]."""
    found: dict[int, list[Tensor]] = {}

    def record(layer: int, site: str, x: Tensor) -> None:
        if site == MLP_IN:
            found.setdefault(layer, []).append(x[:, SINKS:].flatten(0, 1).float())

    with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, record):
        for ids in windows:
            subject.model.base_model(ids[None], use_cache=False)
    return [torch.cat(found[layer]) for layer in sorted(found)]


def _ggml_rows(name: str) -> Callable[[Tensor], Tensor]:
    return lambda gate: ggml.dequantize(name, ggml.quantize(name, gate)).view_as(gate)


def _three_levels(gate: Tensor) -> Tensor:
    """Three levels with a scale for 256 weights, both by least squares in turns: TQ2_0 could hold them."""
    weights = gate.reshape(-1, 256)
    scale = 1.2 * weights.abs().mean(1, keepdim=True)
    for _ in range(12):
        numbers = (weights / scale).round().clamp(-1, 1)
        scale = (weights * numbers).sum(1, keepdim=True) / numbers.square().sum(1, keepdim=True)
    scale = scale.half().float()
    return ((weights / scale).round().clamp(-1, 1) * scale).view_as(gate)


def _ggml_zigzag(gate: Tensor) -> Tensor:
    """Q2_K of 256 neurons and a column; neurons are padded to whole bands."""
    rows, columns = gate.shape
    padded = torch.nn.functional.pad(gate, (0, 0, 0, -rows % zigzag.BAND_ROWS))
    tiles = padded.view(-1, zigzag.BAND_ROWS, columns).transpose(1, 2)
    decoded = _ggml_rows("q2_k")(tiles.reshape(-1, zigzag.BAND_ROWS)).view(tiles.shape)
    return decoded.transpose(1, 2).reshape(-1, columns)[:rows]


KINDS: Mapping[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "four levels, one scale a row": (2.0, lambda gate: copied(gate, 2).decoded()),
    "two levels, one scale a row": (1.0, lambda gate: copied(gate, 1).decoded()),
    "TQ2_0 (three levels, a scale for 256), by ggml": (66 / 32, _ggml_rows("tq2_0")),
    "TQ2_0, by least squares": (66 / 32, _three_levels),
    "Q2_K by rows, by ggml": (84 / 32, _ggml_rows("q2_k")),
    "Q2_K in zigzag order, by ggml": (84 / 32, _ggml_zigzag),
}
"""Bits a weight, and what comes back of a gate."""


def recalls(
    subject: StockSubject,
    checkpoint: StockSubject,
    blocks: Sequence[tuple[Tensor, Tensor]],
    known: Tensor,
    text: Tensor,
) -> list[dict[str, Any]]:
    """For each kind, and what it is made from, the share of the active neurons that is among the listed ones."""
    seen, unseen = inputs_of(subject, known), inputs_of(subject, text)
    sums = {(name, made): np.zeros(3) for name in KINDS for made in ("the file", "the checkpoint")}
    for layer, (gate, _) in enumerate(blocks):
        name = f"{subject.family.block(layer)}.{subject.family.projections[MLP_IN][0]}.weight"
        sources = {"the file": gate, "the checkpoint": checkpoint.source.tensor(name).float()}
        before, active = seen[layer] @ gate.t() > 0, unseen[layer] @ gate.t() > 0
        for (kind, made), into in sums.items():
            copy = KINDS[kind][1](sources[made])
            (above,) = thresholds(seen[layer] @ copy.t(), [round(LISTED * int(before.sum()))])
            listed = unseen[layer] @ copy.t() > above
            into += [int((listed & active).sum()), int(listed.sum()), int(active.sum())]
    return [
        {"kind": kind, "made_from": made, "bits": KINDS[kind][0], "recall": of[0] / of[2], "listed": of[1] / of[2]}
        for (kind, made), of in sums.items()
    ]


def losses(
    subject: StockSubject, reference: StockSubject, data: Windows, copies: Sequence[ReferenceCopy]
) -> dict[str, Any]:
    """What the file loses by the list of these copies."""
    first = scored_from("decode", data[0].shape[1])
    found = torch.zeros(3, dtype=torch.int64)
    listed: dict[int, Tensor] = {}

    def look(layer: int, site: str, x: Tensor) -> Tensor | None:
        if site == MLP_IN:
            listed[layer] = may_be_active(copies[layer], x.float())
        if site != MLP_MID:
            return None
        sparse, active = listed[layer][:, first:], x[:, first:] != 0
        found.add_(torch.stack([(sparse & active).sum(), sparse.sum(), active.sum()]))
        return torch.cat([x[:, :first], torch.where(sparse, x[:, first:], 0.0)], dim=1)

    scorer, dense = (SparseScorer(each.model, each.family, {}, each.context) for each in (subject, reference))
    with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, look):
        scores = score_windows(scorer, *data, "decode", dense)
    both, listed_count, active_count = found.tolist()
    return {"recall": both / active_count, "listed": listed_count / active_count, **summarise(scores, 1)}


@torch.inference_mode()
def again(
    subject: StockSubject, reference: StockSubject, data: Windows, blocks: Sequence[tuple[Tensor, Tensor]], type: str
) -> dict[str, Any]:
    """What the file loses where its gates are quantised again, by rows in ggml's `type`."""
    name = subject.family.projections[MLP_IN][0]
    gates = [layer.get_submodule(name).weight for layer in subject.model.model.layers]
    for weight, (gate, _) in zip(gates, blocks, strict=True):
        weight.copy_(decode_rows(encode_rows(gate, type), type))
    scorer, dense = (SparseScorer(each.model, each.family, {}, each.context) for each in (subject, reference))
    scores = score_windows(scorer, *data, "decode", dense)
    for weight, (gate, _) in zip(gates, blocks, strict=True):
        weight.copy_(gate)
    return {"type": type, **summarise(scores, 1)}


@torch.inference_mode()
def counts_of(
    subject: StockSubject, windows: Tensor, copies: Mapping[Key, Sequence[ReferenceCopy]]
) -> dict[Key, np.ndarray]:
    """How often each neuron was listed by each of these copies, and active, in the dense model, in the second halves of
    windows: int64 [2, blocks, neurons]."""
    first = scored_from("decode", windows.shape[1])
    layers = next(iter(copies.values()))
    found = {key: np.zeros((2, len(layers), len(layers[0].limits)), np.int64) for key in copies}

    def look(layer: int, site: str, x: Tensor) -> None:
        for key, into in found.items():
            if site == MLP_IN:
                into[0, layer] += may_be_active(copies[key][layer], x[0, first:].float()).sum(0).numpy()
            if site == MLP_MID:
                into[1, layer] += (x[0, first:] != 0).sum(0).numpy()

    with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, look):
        for ids in windows:
            subject.model.base_model(ids[None], use_cache=False)
    return found


def hit_rates(counts: np.ndarray, frequency: np.ndarray, share: float) -> tuple[float, float]:
    """With slots by frequency for a share of the neurons: the share of what was listed, and of what was active, that
    has one."""
    resident = across_blocks(frequency, budget_of(share, frequency)).resident
    listed, active = (float(each[resident].sum() / each.sum()) for each in counts)
    return listed, active


def speeds(
    machine: Machine, shape: Shape, vram: float, bits: int, counts: np.ndarray, frequency: np.ndarray, tokens: int
) -> dict[str, float | None]:
    """Tokens per second of each way to know who is active; None where what must be on the GPU does not fit.

    counts -- how often each neuron was listed, and active, at so many tokens: [2, blocks, neurons]
    """
    listed, density = (float(each.sum()) / tokens / frequency.size for each in counts)
    parts, blocks = shape.parts, shape.layers
    rates = machine.rates(parts.record)
    room = vram - parts.work_within(int(vram)).bytes - parts.output - sum(parts.attention) - parts.cache

    def first_ones(each: int) -> int:
        return min(blocks, max(0, int(room // each)))

    def slots(bytes_left: float, each: int) -> int:
        return min(parts.all_neurons, max(0, int(bytes_left // each)))

    def token(plan: Plan, listed_by_bus: bool = False) -> TokenSeconds:
        """listed_by_bus: listed gates without a slot come over the bus alone, else each side reads what it computes."""
        listed_hit, hit = hit_rates(counts, frequency, plan.share)
        about = Listed(0.0, 1.0) if listed_by_bus else Listed(listed, listed_hit)
        made = seconds_per_token(rates, plan, density, hit, 0.0, over_the_bus=True, listed=about)
        gates = listed * (1 - listed_hit) * plan.copied * parts.neurons * plan.parts.gate
        return replace(made, far=made.far + gates / rates.bus) if listed_by_bus else made

    near = first_ones(parts.gates[0])
    rest = slots(room - sum(parts.gates), parts.record) if near == blocks else 0
    plan = Plan(parts, rest, blocks, near)
    by_both = token(plan)
    found: dict[str, float | None] = {
        "llama.cpp": dense_split(rates, parts, vram),
        "gates near": by_both.rate if near == blocks else None,
        "gates far, by the bus": replace(by_both, far=plan.always_read()[1] / rates.bus).rate,
        "gates far, by both": by_both.rate,
    }
    for name, table_bits, gate_bits, by_bus in (
        ("copy, bus", TABLE_BITS, 4.0, True),
        ("copy, Q4_K", 0.0, 4.5, False),
        ("copy, Q6_K", 0.0, 6.5625, False),
    ):
        copy = int((bits + table_bits) / 8 * shape.units * shape.hidden)
        of = replace(parts, copies=(copy,) * blocks, gate=int(gate_bits / 8 * shape.hidden))
        copied = first_ones(copy)
        rest = slots(room - copied * copy, of.record + of.gate) if copied == blocks else 0
        found[name] = token(Plan(of, rest, blocks, 0, copied=copied), by_bus).rate
    return found


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@books_options
@click.option("--samples", default=4, help="Windows of the calibration text, for the thresholds of the first table.")
@click.option("--windows", default=12, help="Windows of the text, evenly spread; half of them for the first table.")
@click.option("--tokens", default=1024, help="Of a window.")
@click.option("--times", multiple=True, type=float, default=(1.5, 2.0, 3.0), help="Listed, in active ones.")
@click.option("--parts", default="again,listed", help="Of the losses, which take longest: again, listed, or both.")
@json_option
def main(
    path: Path,
    model: str,
    calibration_text: str,
    text: str,
    samples: int,
    windows: int,
    tokens: int,
    times: tuple[float, ...],
    parts: str,
    json_path: Path | None,
) -> None:
    """Print the tables for one model."""
    subject, reference, checkpoint = open_subject(str(path)), open_subject(str(path)), open_subject(model)
    blocks = blocks_of(read_packed(path))
    known, _ = windows_of(subject, calibration_text, samples, context=tokens)
    data = windows_of(subject, text, windows, context=tokens)
    kinds = recalls(subject, checkpoint, blocks, known, data[0][::2])
    click.echo(f"{LISTED:g} times as many as are active\n\n{kinds_table(kinds)}")

    copies = {
        (bits, each): [
            load_gate_copy(copy, limits(copy, gate, frequency, each))
            for gate, frequency in blocks
            for copy in [copied(gate, bits)]
        ]
        for bits in (2, 1)
        for each in times
    }
    frequency = np.stack([each.double().numpy() for _, each in blocks])
    scored = len(data[0]) * (tokens - scored_from("decode", tokens))
    rows = [
        {
            "bits": bits,
            "times": each,
            "machine": name,
            "vram": budget,
            **speeds(machine, SHAPES["70b"], 1e9 * budget, bits, counts, frequency, scored),
        }
        for (bits, each), counts in counts_of(subject, data[0], copies).items()
        for name, machine in MACHINES.items()
        for budget in BUDGETS
    ]
    for bits, each in copies:
        here = [row for row in rows if (row["bits"], row["times"]) == (bits, each)]
        click.echo(f"\n70b, copies in {bits} bits, {each:g} times as many listed\n\n{speeds_table(here)}")

    found: dict[str, Any] = {"kinds": kinds, "speeds": rows}
    click.echo(f"\n{len(data[0])} windows of {tokens}, second halves, protocol decode")
    if "again" in parts:
        found["again"] = [again(subject, reference, data, blocks, type) for type in ("Q4_K", "Q6_K")]
        click.echo(f"\n{_table_of_losses(found['again'], ('type',))}")
    if "listed" in parts:
        found["losses"] = [
            {"bits": bits, "times": each, **losses(subject, reference, data, loaded)}
            for (bits, each), loaded in copies.items()
        ]
        click.echo(f"\n{_table_of_losses(found['losses'], ('bits', 'times', 'listed', 'recall'))}")
    write_figures(json_path, found)


def kinds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each kind of copy finds."""
    head = ["copy", "bits a weight", "made from", "recall", "listed, in active ones"]
    cells = [
        [row["kind"], f"{row['bits']:.2f}", row["made_from"], f"{row['recall']:.4f}", f"{row['listed']:.3f}"]
        for row in rows
    ]
    return markdown(Table(head, cells))


def _table_of_losses(rows: Sequence[Mapping[str, Any]], named: Sequence[str]) -> str:
    """Losses behind what they are of."""
    shown = {"perplexity, x": "perplexity_ratio", "KL, nats": "kl_divergence", "same top token": "top_token_agreement"}
    cells = [
        [
            *(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in named),
            *(with_error(row[figure], 5) for figure in shown.values()),
        ]
        for row in rows
    ]
    return markdown(Table([*named, *shown], cells))


def speeds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second by machine and budget."""
    named = [name for name in rows[0] if name not in ("bits", "times", "machine", "vram")]
    cells = [
        [row["machine"], f"{row['vram']} GB", *("-" if row[name] is None else f"{row[name]:.1f}" for name in named)]
        for row in rows
    ]
    return markdown(Table(["machine", "GPU", *named], cells))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
