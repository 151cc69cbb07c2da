"""`sparsepack inspect` and `verify`, and what they find as text for people."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.collect import calibration_table
from sparsepack.calibrate.thresholds import thresholds_table
from sparsepack.calibrate.trace import trace_table
from sparsepack.cli.command import Existing, command, emit, json_output
from sparsepack.cli.shared import ARTIFACT
from sparsepack.inspection import artifact_line, detect_kind, programs_table, score_rows
from sparsepack.tables import Table, markdown

_PROBLEMS = 8  # told of one artifact


@command(short_help="Show what an artifact, calibration, table or trace holds.")
@click.argument("path", type=Existing("an artifact, a thresholds table, a calibration folder or a trace"))
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a checkpoint, a thresholds table, a calibration folder or a trace holds, and which
    programs can load an artifact."""
    kind = detect_kind(path)
    shown: dict[str, list[Callable[[Any], str]]] = {
        "artifact": [artifact_table],
        "checkpoint": [checkpoint_table],
        "thresholds": [thresholds_table],
        "calibration": [
            calibration_table,
            channels_table,
            lambda found: neurons_table(found["neurons"]) if found["neurons"] else "",
            given_table,
            starved_note,
        ],
        "trace": [trace_table, lambda found: neurons_table(found["neurons"])],
    }
    emit(
        kind.read(path), json_path, lambda found: "\n\n".join(filter(None, (part(found) for part in shown[kind.name])))
    )


@command(short_help="Check that an artifact is whole, and of which model.")
@click.argument("path", type=ARTIFACT)
@click.option("--against", metavar="MODEL", help="Compare every matrix with this checkpoint.")
@json_output
def verify(path: Path, against: str | None, json_path: str | None) -> None:
    """Check an artifact: every byte's hash, shapes, padding; with --against, that it is that model. Exit 1 if not."""
    from sparsepack.formats.verify import verify as check

    report = check(path, against)
    emit(report.to_json(), json_path, verification)
    if not report.passed:
        sys.exit(1)


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
    if description["distilled"]:
        parts.append(f"distilled: {description['distilled']['in_words']}")
    if description["refit"]:
        parts.append(f"weights of the blocks: {description['refit']['in_words']}")
    parts += [f"{text}: {figures}" for text, figures in score_rows(description["score"])]
    if description["attention"]:
        parts.append(f"attention, Double Sparsity: {description['attention']['in_words']}")
    if description["segments"]:
        parts.append(f"segments: {description['segments']['in_words']}")
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
    problems = [problem.removeprefix(f"{report['path']}: ") for problem in report["problems"]]
    if problems:  # the reason before hundreds of tensors that follow from it
        parts.append(f"{report['path']}: {verdict}: {problems[0]}")
    if report["tensors"]:
        rows = [
            [t["name"], t["type"], f"{t['error']:.5f}", f"{t['bound']:.5f}", "ok" if t["passed"] else "FAIL"]
            for t in report["tensors"]
        ]
        parts.append(Table(["tensor", "type", "relative error", "bound", ""], rows))
    parts += [f"problem: {problem}" for problem in problems[1:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        parts.append(f"and {len(problems) - _PROBLEMS} more problems, which --json lists")
    made = f" ({', '.join(report['checked'])})" if report["checked"] else ""
    if made or not problems:
        parts.append(f"{report['path']}: {verdict}{made}")
    return markdown(*parts)


def channels_table(result: Mapping[str, Any]) -> str:
    """What `inspect` found in a calibration about the channels of attention, and about the tokens that it needs; empty
    where that was not counted, in a family without a row."""
    from sparsepack.calibrate.folder import attention_blocks

    if result["attention"] is None:
        return ""
    report, tokens = result["attention_channels"], result["attention_tokens"]
    if report is None:
        return "no block has attention"
    head_dim, compared, blocks = report["head_dim"], report["compared"], attention_blocks(result)
    rows = [
        [
            blocks[number],
            *map(_percent, row["share"]),
            *(_percent(row["heads_agree"][name]) for name in ("query", "key", "product")),
            _percent(row["key_agrees"]),
            *map(_percent, tokens["layers"][number]["missed"]),
        ]
        for number, row in enumerate(report["layers"])
    ]
    tops = [f"top {count}" for count in report["counts"]]
    misses = [f"{share} misses" for share in tokens["shares"]]
    even = ", ".join(f"{100 * count / head_dim:.3g}%" for count in report["counts"])
    lines = [
        f"attention channels, {head_dim} in each head; those that move the scores q.k most are heavy",
        f"  {', '.join(tops)}: share of q*k in so many heavy channels of a head; {even} if all were alike",
        f"  heads, by q, by k, by q*k: share of the {compared} heaviest channels that two heads have in common; "
        f"{100 * report['chance']:.3g}% by chance",
        "  k and q*k: the same of one head's channels, once by k and once by q*k",
        f"  {tokens['shares'][0]} misses: share of the attention weight that is not on the best {tokens['shares'][0]} "
        "of the tokens; a block that misses most of it should read all",
    ]
    notes = []
    if report["alike"]:
        alike = [str(blocks[number]) for number in report["alike"]]
        named = f"block{'s' * (len(alike) > 1)} {', '.join(alike)}"
        notes.append(f"note: the heads of {named} have nearly the same heavy channels, as if heads were mixed up")
    columns = ["block", *tops, "heads, by q", "by k", "by q*k", "k and q*k", *misses]
    return markdown(Table(columns, rows, "\n".join(lines), notes))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def checkpoint_table(found: Mapping[str, Any]) -> str:
    """A model as it is before it is packed."""
    if found["refused"] is not None:
        return markdown(
            f"{found['path']}: a checkpoint, {found['model_type']}, {found['bytes']:,} bytes",
            stored_table(found["stored"]),
            f"no other command takes it: {found['refused'].removeprefix(found['path'] + ': ')}",
        )
    rows = [[site, f"{outputs:,} x {inputs:,}"] for site, (outputs, inputs) in found["sites"].items()]
    return markdown(
        f"{found['path']}: a checkpoint, {found['model_type']} ({found['sha256'][:12]}), {found['weights']:,} weights, "
        f"{found['bytes']:,} bytes, most of them read as {found['dtype']}",
        f"{found['layers']} blocks of {found['hidden']:,} channels, {found['vocabulary']:,} tokens, made for texts of "
        f"{found['context']:,}",
        stored_table(found["stored"]),
        Table(["site", "outputs x inputs, in each block"], rows),
        *([f"note: {found['grid']}"] if found["grid"] else []),
        *([f"segments: {found['segments']['in_words']}"] if found["segments"] else []),
        _pruned(found["pruned"]),
        _rotated(found["rotated"]),
        f"distilled: {found['distilled']['in_words']}" if found["distilled"] else "not distilled by sparsepack",
        found["formats"],
    )


def stored_table(types: Sequence[Mapping[str, Any]]) -> Table:
    """How the tensors of a checkpoint are stored."""
    bits = "{:.4g}".format
    rows = [
        [
            each["name"],
            each["tensors"],
            f"{each['weights']:,}",
            f"{each['nbytes']:,}",
            bits(each["bits_per_weight"] or 0),
        ]
        for each in types
    ]
    return Table(["stored as", "tensors", "weights", "bytes", "bits a weight"], rows)


def _pruned(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not pruned by sparsepack"
    patterns = ", ".join(f"keep {pattern} in {count} matrices" for pattern, count in record["matrices"].items())
    permuted = ", inputs in another order" if record["permute"] else ""
    return f"pruned from {record['model']} ({record['model_sha256'][:12]}) by {record['method']}{permuted}: {patterns}"


def _rotated(record: Mapping[str, Any] | None) -> str:
    from sparsepack.models.provenance import basis_in_words

    if record is None:
        return "not rotated by sparsepack"
    into = basis_in_words(record["basis"], record["boundaries"])
    return (
        f"rotated from {record['model']} ({record['model_sha256'][:12]}) into {into}: the same function, "
        f"its logits differ by {record['error']:.1g} of their size"
    )


def neurons_table(report: Mapping[str, Any]) -> str:
    """What `inspect` found of neurons, or of experts, in a calibration or a trace (`tracing.activity_report`)."""
    tops = [f"hottest {100 * share:.0f} %" for share in report["shares"]]
    drifts, unit = report["drift"] is not None, report["unit"]
    rows = [[number, *_row(layer, drifts, f"{layer['spread']:.3f}")] for number, layer in enumerate(report["layers"])]
    rows.append(["all", *_row(report, drifts, "")])
    lines = [
        f"{unit}, over {report['tokens']:,} tokens",
        f"  active: share of the {unit} that a token has active; spread: its standard deviation over tokens",
        f"  hottest: share of what is active that is of so many of the most used {unit} of the block, or of all blocks",
    ]
    if drifts:
        lines.append(
            "  own, others: the same for the hottest 30 % of a document by its own counts, and by those of the others; "
            "they are apart where documents differ"
        )
    head = ["block", "active", "spread", *tops, *(["own", "others"] if drifts else [])]
    return markdown(Table(head, rows, "\n".join(lines), [str(report["verdict"])]))


def given_table(found: Mapping[str, Any]) -> str:
    """How many tokens a calibration gave the experts of each block; empty for a model without experts."""
    if found["given"] is None:
        return ""
    rows = [
        [block, f"{each[0]:,}", f"{each[len(each) // 2]:,}", f"{each[-1]:,}"]
        for block, each in enumerate(map(sorted, found["given"]))
    ]
    about = "tokens that an expert was given; all counts are in `given` of --json"
    return markdown(Table(["block", "the fewest", "the middle one", "the most"], rows, about))


def starved_note(found: Mapping[str, Any]) -> str:
    """What a calibration says of experts that were given few tokens; empty where there is nothing to say."""
    return f"note: {found['starved']}" if found.get("starved") else ""


def _row(part: Mapping[str, Any], drifts: bool, spread: str) -> list[str]:
    shares = [*part["hottest"], *(part["drift"].values() if drifts else [])]
    return [f"{part['density']:.3f}", spread, *(f"{share:.2f}" for share in shares)]
