"""The result of `bench_linears` as Markdown: microseconds of every product, and how many times as fast the sums are."""

from collections.abc import Mapping
from typing import Any

BASELINES = ("BF16", "INT8, no scales", "INT8", "FP8", "FP8, a scale a matrix")


def linears_table(result: Mapping[str, Any]) -> str:
    """A table of microseconds for each number of tokens, with the share of the GPU's bound, and one of ratios."""
    seconds = {(r["tokens"], r["rows"], r["columns"], r["contender"]): r for r in result["products"]}
    lines = [f"{result['device']}; read bandwidth {result['read_bandwidth'] / 1e9:.0f} GB/s", ""]
    names, linears = result["contenders"], result["linears"]
    sums = {}
    for tokens in result["tokens"]:
        lines += _head([f"{tokens} tokens, us (of the bound)", *names])
        for linear in linears:
            found = [seconds[tokens, linear["rows"], linear["columns"], name] for name in names]
            label = f"{linear['name']} {linear['rows']} x {linear['columns']}, {linear['count']} of them"
            lines.append(_row([label, *(_cell(row) for row in found)]))
        for name in names:
            sums[tokens, name] = sum(
                n["count"] * seconds[tokens, n["rows"], n["columns"], name]["seconds"] for n in linears
            )
        lines += [_row(["all of them", *(f"{sums[tokens, name] * 1e6:.0f}" for name in names)]), ""]
    lines += _head(["times as fast, all of them", "tokens", *names])
    for baseline in (name for name in BASELINES if name in names):
        for tokens in result["tokens"]:
            ratios = [f"{sums[tokens, baseline] / sums[tokens, name]:.2f}" for name in names]
            lines.append(_row([f"as dense {baseline}", str(tokens), *ratios]))
    lines += ["", "Quantising the inputs is included, and scaling the outputs where not said otherwise."]
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    share = "" if row["share"] is None else f" ({row['share']:.0%})"
    return f"{row['seconds'] * 1e6:.1f}{share}"


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), _row(["---", *["---:"] * (len(cells) - 1)])]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
