"""`sparsepack place`, and what came of it as text for people."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import command, emit, from_options, json_output, options_from
from sparsepack.cli.shared import ARTIFACT, CALIBRATION, usable_device
from sparsepack.placement.options import PlaceOptions
from sparsepack.progress import format_count
from sparsepack.tables import Table, markdown


@command(short_help="Say what of a model lies on a card, and what in host memory.")
@click.argument("path", type=ARTIFACT)
@from_options(PlaceOptions, "--vram", required=True)
@options_from(PlaceOptions, "--context", "--gate-copy")
@click.option(
    "--calibration",
    type=CALIBRATION,
    help="Of a file with experts: a folder made by `sparsepack calibrate` or `sparsepack trace`, which says how often "
    "each is used.",
)
@from_options(PlaceOptions, "--device", callback=usable_device)
@from_options(PlaceOptions, "--machine")
@json_output
def place(path: Path, calibration: Path | None, json_path: str | None, **asked: Any) -> None:
    """Say what of a file lies in the GPU's memory and what in the host's, within a budget.

    Shown are bytes, and the tokens per second that a model of time expects; of files of the format neuron-q4_k also the
    slots of each block, and how much of what a token needs has a slot. Nothing is written, and no GPU is needed;
    `generate --vram` loads the model so. Of a model with experts slots are for these; no engine loads it so yet.
    """
    options = PlaceOptions(**asked)
    from sparsepack.placing import place as plan

    emit(plan(path, options, calibration), json_path, placement_table)


NAMES: Mapping[str, Mapping[str, str]] = {
    "experts": {"gates": "routers"},
    "columns": {"gates": "gate and up", "records": "down", "records for the processor": "down for the processor"},
}
"""What people read for parts of a model that has slots for these units, or none for columns."""


def placement_table(result: Mapping[str, Any]) -> str:
    """What `placing.place` found."""
    from sparsepack.placement.budget import format_bytes

    card, host, unit = result["card"], result["host"], result["unit"]
    named = NAMES.get(unit, {})
    rows = [
        [
            named.get(name, name),
            *(format_bytes(size) if size else "-" for size in (card.get(name, 0), host.get(name, 0))),
            _where(name, result),
        ]
        for name in dict.fromkeys((*card, *host))
    ]
    rows.append(["together", format_bytes(sum(card.values())), format_bytes(sum(host.values())), ""])
    speed, columns = result["tokens_per_second"], unit == "columns"
    hits = _read_in_words(result)
    if result["listed"] is not None:
        hits += (
            f"\nCopies of gates list at most {100 * result['listed']:.1f} % of the neurons of a block as maybe active; "
            "of these alone the exact gates are read, so that who is missed is lost."
        )
    expected = (
        f"tokens per second on {result['machine']}, by a model of time that is a bound: {speed['processor']:.1f} where "
        f"the processor computes what {'is not on the card' if columns else 'has no slot'}, "
        f"{speed['and_bus']:.1f} where the bus shares all that is far; a "
        f"dense model split by weights {speed['dense_split']:.1f}"
    )
    if speed["dense_split"] > max(speed["processor"], speed["and_bus"]):
        expected += (
            f".\nBy this model of time {'this does' if columns else 'slots do'} not pay for this file and budget: the "
            "dense split hands nothing over, and is faster"
        )
    title = (
        f"{result['file']} in {format_bytes(result['vram'])} of the GPU's memory, context of "
        f"{result['context']:,} tokens "
        f"({result['cache_type']}); the least that works is {format_bytes(result['least'])}; the driver takes up to "
        f"{format_bytes(result['driver'])} beside it"
    )
    return markdown(title, Table(["what", "on the card", "in host memory", "where"], rows), hits, expected)


def _read_in_words(result: Mapping[str, Any]) -> str:
    """What a token needs, and what of it has slots."""
    unit, slots = result["unit"], result["slots"]
    needed, total = 100 * result["density"], result["neurons"] * result["blocks"]["all"]
    if "planes" in result["blocks"]:
        return (
            "Of a matrix the first planes lie on the card, the others in host memory; a token is taken to read "
            f"{needed:.3g} % of its bytes, as the file was packed for, and all that it can on the card."
        )
    if unit == "columns":
        return (
            "A matrix of attention, gate and up, or down lies as a whole on the card or in host memory; a token is "
            f"taken to read {needed:.3g} % of its columns, as the file was packed for."
        )
    active, origin = ("used", "the calibration") if unit == "experts" else ("active", "the file")
    return (
        f"slots: {sum(slots):,} of {total:,} {unit} ({100 * sum(slots) / total:.1f} %), across blocks by how "
        f"often each was {active}; of each block {_listed(slots)}.\n"
        f"A token needs {needed:.1f} % of the {unit}; {100 * result['hit_rate']:.1f} % of these have "
        f"slots, by {origin}'s frequencies, when nothing moves."
    )


def _where(name: str, result: Mapping[str, Any]) -> str:
    """In words, where a part of the model lies."""
    blocks, there = result["blocks"], result["host"].get(name, 0)
    if not result["card"].get(name, 0) and not there:
        return "it is the output" if name == "embedding" else "-"
    if name == "gates" and blocks["copied"]:
        far = blocks["all"] - blocks["copied"]
        rows = "the rows of listed neurons are read by the bus and the processor"
        return f"{rows}; of {format_count(far, 'block')} all" if far else rows
    if name == "copies of gates":
        first = "" if blocks["copied"] == blocks["all"] else "the first "
        return f"card: of {first}{format_count(blocks['copied'], 'block')}"
    if name in ("attention", "gates", "records") and there and (near := blocks.get(name)) is not None:
        others = "by the bus and the processor"
        if "planes" in blocks:
            one_more = f", of the first {format_count(near, 'block')} one more" if near else ""
            return f"card: {format_count(blocks['planes'], 'plane')}{one_more}; the others {others}"
        return f"card: the first {format_count(near, 'block')}; the others {others}" if near else f"read {others}"
    if name == "records" and "records" not in blocks:
        return f"card: slots; host: of all {result['unit']}, pinned" if there else f"card: all {result['unit']}"
    if name not in result["card"]:
        return "the same once more, as its kernels read them; of matrices only its part"
    if there:
        return "a row for each token, over the bus" if name == "embedding" else "read over the bus"
    return "card"


def _listed(slots: Sequence[int]) -> str:
    """Numbers with commas between them; of several blocks that have as many, the number once."""
    parts = [(count, len(list(same))) for count, same in groupby(slots)]
    return ", ".join(f"{count:,}" + (f" ({blocks} blocks)" if blocks > 1 else "") for count, blocks in parts)
