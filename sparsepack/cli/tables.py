"""Results as text for people: Markdown tables, which read well in a terminal and paste into an issue."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsepack.eval.tables import accuracy_tables, share_read, skipped
from sparsepack.inspection import programs_table
from sparsepack.models.records.skipped import shown
from sparsepack.models.records.sparse_attention import in_words
from sparsepack.placement.counts import hits_in_words
from sparsepack.progress import counted
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.records.pruned import Pruned, PrunedMatrix


def _made_from(manifest: Mapping[str, Any], between: Mapping[str, str]) -> str:
    """A line each: the model and the text of a manifest, what is `between`, and the types that were computed in."""
    model = manifest["model"]
    values = {
        "model": f"{model['name']} ({model['model_type']}, {model['layers']} blocks, {model['sha256'][:12]})",
        "text": "; ".join(f"{t['name']} ({t['documents']} documents)" for t in manifest["texts"]),
        **between,
        "computed in": _precision(manifest["compute"]),
    }
    width = max(map(len, values))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in values.items())


def calibration_table(manifest: Mapping[str, Any]) -> str:
    """What a calibration was made of."""
    tokens = manifest["tokens"]
    return _made_from(
        manifest,
        {
            "windows": f"{tokens['windows']} of {tokens['context']} tokens",
            "counted": f"{tokens['counted']:,} tokens; left out: {tokens['sinks_left_out']:,} sinks, "
            f"{tokens['padding_left_out']:,} padding",
        },
    )


def trace_table(manifest: Mapping[str, Any]) -> str:
    """What a trace was made of."""
    rule, sessions = manifest["rule"], manifest["sessions"]
    documents = sum(row["document"] is not None for row in sessions)
    lengths = sorted({row["tokens"] for row in sessions})
    prompts = sorted({row["prompt"] for row in sessions})
    which = "not zero" if rule["active"] == "nonzero" else f"above a threshold that {100 * rule['share']:g} % pass"
    return _made_from(
        manifest,
        {
            "sessions": f"{len(sessions)} of {_range(lengths)} tokens, the first {_range(prompts)} of them prompt; "
            f"{documents} from the middle of a document of their own",
            "neurons": f"{manifest['intermediate']:,} in a block; active: {which}",
        },
    )


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _precision(compute: Mapping[str, Any]) -> str:
    """The type that was computed in, the device, and the type of the stored weights."""
    return f"{compute['dtype']} on {compute['device']}; weights stored in {compute['weights']}"


def pruned_table(pruned: "Pruned") -> str:
    """What was pruned: a row per block, of each site the error of its outputs, and what was asked."""
    blocks: dict[str, dict[str, list[PrunedMatrix]]] = {}
    for row in pruned.matrices:
        _, layer, site = row.site.split(".")
        blocks.setdefault(layer, {}).setdefault(site, []).append(row)
    sites = list(dict.fromkeys(site for block in blocks.values() for site in block))
    body = [[layer, *(_pruned_cell(block.get(site, [])) for site in sites)] for layer, block in blocks.items()]
    options = pruned.options
    patterns = dict.fromkeys(f"keep {row.keep} of {row.of}" for row in pruned.matrices)
    tails = {row.tail for row in pruned.matrices if row.tail}
    more = f"; last groups of {', '.join(map(str, sorted(tails)))} inputs hold as many" if tails else ""
    density = sum(row.density for row in pruned.matrices) / max(len(pruned.matrices), 1)
    return (
        f"{markdown(Table(['block', *sites], body))}\n\nrelative error of the outputs; * inputs in another order\n"
        f"{', '.join(patterns)}, by {options['method']}: of the weights of {len(pruned.matrices)} matrices "
        f"{100 * density:.1f} % are not zero{more}"
    )


def _pruned_cell(rows: "Sequence[PrunedMatrix]") -> str:
    """The largest error of a site's matrices."""
    if not rows:
        return "-"
    return f"{max(row.error for row in rows):.3f}{'*' if any(row.permuted for row in rows) else ''}"


def thresholds_table(summary: Mapping[str, Any]) -> str:
    """A thresholds table: a row per block, of each site what its threshold skips on the calibration text, and that."""
    rows = summary["rows"]
    sites = list(dict.fromkeys(row["site"] for row in rows))
    by_key = {(row["layer"], row["site"]): row for row in rows}
    body = []
    for layer in sorted({row["layer"] for row in rows}):
        cells = [by_key.get((layer, site)) for site in sites]
        body.append([layer, *(_site_cell(cell) if cell else "-" for cell in cells)])
    vectors = [name for name in ("channel_weights", "offset") if any(row.get(name) for row in rows)]
    head = (
        f"{summary['allocation']}, {summary['criterion']}, target {summary['sparsity']}, upstream {summary['upstream']}"
        + (f"; per channel: {', '.join(vectors)}" if vectors else "")
    )
    outlook = summary.get("expected")
    said = "not known, measure it with `sparsepack eval`" if outlook is None else shown(**outlook)
    parts: list[str | Table] = [head, Table(["block", *(f"{site} (skips @ threshold)" for site in sites)], body)]
    parts.append(f"a decoded token skips, on text like the calibration text: {said} of all block weights")
    if notes := _edited(summary):
        parts.append("\n".join(f"note: {note}" for note in notes))
    return markdown(*parts)


def _site_cell(row: Mapping[str, Any]) -> str:
    expected = row.get("expected")
    if expected == 0 and row["threshold"] == 0:
        return "dense"
    return f"{'?' if expected is None else f'{100 * expected:.1f} %'} @ {row['threshold']:.4g}"


_FAR = 0.02
_MOST_NOTES = 8


def _edited(summary: Mapping[str, Any]) -> list[str]:
    """The lines that say which field counts where a table, as after an edit, asks for other than what will happen."""
    notes = [
        f"blk.{row['layer']}.{row['site']}: `threshold` counts, not `sparsity`: {row['threshold']:.4g} skips "
        f"{100 * row['expected']:.1f} %, not {100 * row['sparsity']:.1f} %"
        for row in summary["rows"]
        if row.get("expected") is not None and abs(row["expected"] - row["sparsity"]) > _FAR
    ]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"the same of {len(notes) - _MOST_NOTES} more sites"]
    outlook = summary.get("expected")
    if outlook is not None and abs(outlook["of_sparse_sites"] - summary["sparsity"]) > _FAR:
        notes.append(f"the thresholds count, not the table's `sparsity` of {100 * summary['sparsity']:.1f} %")
    return notes


def artifact_line(description: Mapping[str, Any]) -> str:
    """One line on a file just made."""
    bits = description["bits_per_weight"]
    return (
        f"{description['path']}: {description['kind']}, {description['file_bytes']:,} bytes, "
        f"{_bits(bits['blocks'])} bits per weight in the blocks, {_bits(bits['file'])} overall, "
        f"{description['sparse_sites']} sparse sites"
    )


def _bits(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"


def artifact_table(description: Mapping[str, Any]) -> str:
    """Everything `inspect` finds in an artifact."""
    model = description["provenance"]["model"]
    parts: list[str | Table] = [
        artifact_line(description),
        f"made from {model['name']} ({model['model_type']}, {model['sha256'][:12]}) "
        f"by sparsepack {description['provenance']['sparsepack']}",
        Table(
            ["type", "tensors", "bytes", "weights"],
            [[t, e["tensors"], f"{e['bytes']:,}", f"{e['weights']:,}"] for t, e in description["types"].items()],
        ),
    ]
    if description["thresholds"]:
        parts.append(thresholds_table(description["thresholds"]))
    if description["refit"]:
        parts.append(f"weights of the blocks: {description['refit']['in_words']}")
    if description["attention"]:
        parts.append(f"attention, Double Sparsity: {description['attention']['in_words']}")
    if description["neurons"]:
        parts.append(f"neurons: {description['neurons']['in_words']}")
    if description["padding_rows"]:
        parts.append(f"padding rows: {sum(description['padding_rows'].values()):,} in all")
    parts.append(programs_table(description))
    return markdown(*parts, *(f"note: {note}" for note in description["notes"]))


def verification(report: Mapping[str, Any]) -> str:
    """What `verify` found."""
    parts: list[str | Table] = []
    verdict = "passed" if report["passed"] else "FAILED"
    if report["problems"]:  # the reason before hundreds of tensors that follow from it
        parts.append(f"{report['path']}: {verdict}: {report['problems'][0].removeprefix(report['path'] + ': ')}")
    if report["tensors"]:
        rows = [
            [t["name"], t["type"], f"{t['error']:.5f}", f"{t['bound']:.5f}", "ok" if t["passed"] else "FAIL"]
            for t in report["tensors"]
        ]
        parts.append(Table(["tensor", "type", "relative error", "bound", ""], rows))
    parts += [f"problem: {problem}" for problem in report["problems"]]
    made = f" ({', '.join(report['checked'])})" if report["checked"] else ""
    parts.append(f"{report['path']}: {verdict}{made}")
    return markdown(*parts)


def evaluation_table(result: Mapping[str, Any]) -> str:
    """What `eval` measured."""
    tasks, attention = result["tasks"], result["subject"]["attention"]
    parts: list[str | Table] = [
        f"{result['subject']['name']} ({result['subject']['kind']})\ncomputed in {_precision(result['compute'])}",
        *accuracy_tables([result]),
    ]
    measured = [*result["perplexity"], *([tasks] if tasks else [])]
    if tasks:
        parts.append(f"skipped in tasks: {skipped(tasks['realised_sparsity'])} of the block weights")
        if tasks["served"]:
            parts.append(f"in tasks: {hits_in_words(tasks['served'])}")
        if tasks["tokens_read"]:
            parts.append(f"read in tasks: {share_read(tasks['tokens_read'])} of the tokens seen")
    if any(row["realised_sparsity"]["neurons_counted"] is False for row in measured):
        parts.append(
            "skipped: not counted, transformers computes inactive neurons like all others; with --backend cpu they are "
            "left out, as by generate"
        )
    if attention is not None:
        told = f"{in_words(attention)}\ntokens read: by layers that read a share"
        reads = any(row["tokens_read"] for row in measured)
        parts.append(f"attention: {told if reads else 'not used by protocol ' + result['protocol']}")
    return markdown(*parts)


_TILE_CONFIG = ("span", "tile", "tile_bands", "warps", "stages", "splits")
"""`tune` chooses the values of these fields, on CPUs and on GPUs."""


def tuning_table(result: Mapping[str, Any]) -> str:
    """What `tune` measured."""
    shapes = result["shapes"]
    parameters = [name for name in _TILE_CONFIG if shapes and name in shapes[0]]
    rows = [
        [
            f"{row['rows']} x {row['columns']}",
            *(row[name] for name in parameters),
            f"{row['microseconds']:.1f}",
            f"{row['slowest_microseconds']:.1f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
        ]
        for row in shapes
    ]
    header = ["rows x columns", *parameters, "us", "slowest us", "GB/s"]
    machine = result.get("gpu_info") or (
        f"{result['cpu_info']}, {result['instruction_set']}, {counted(result['threads'], 'thread')}"
    )
    parts: list[str | Table] = [
        f"{machine}, half of the columns active",
        Table(header, rows),
        f"kept in {result['path']}",
    ]
    if links := result.get("links"):
        parts += [_links_table(links), *(f"kept in {row['path']}" for row in links)]
    return markdown(*parts)


_LINKS = {"resident": "out of slots", "bus": "out of host memory", "worker": "by the second worker"}


def _links_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """Neurons per second, a row for each width of records."""
    rows = [
        [
            row["hidden"],
            *(f"{row['together'][name] / 1e6:.2f} ({row['alone'][name] / 1e6:.2f})" for name in _LINKS),
            f"{row['together']['handover'] * 1e6:.0f}",
        ]
        for row in links
    ]
    header = ["channels", *(f"{name}, M/s" for name in _LINKS.values()), "handing over, us"]
    return Table(header, rows, "neurons per second, both workers at once (one alone)")
