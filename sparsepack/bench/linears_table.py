"""The result of `bench_linears` as Markdown: microseconds of every product, and how many times as fast the sums are."""

from collections.abc import Mapping
from typing import Any

from sparsepack.markdown import table

BASELINES = ("BF16", "INT8, no scales", "INT8", "FP8", "FP8, a scale a matrix")


def linears_table(result: Mapping[str, Any]) -> str:
    """A table of microseconds for each number of tokens, with the share of the GPU's bound, and one of ratios."""
    found = {(r["tokens"], r["rows"], r["columns"], r["contender"]): r for r in result["products"]}
    names, linears = result["contenders"], result["linears"]
    parts = [f"{result['device']}; read bandwidth {result['read_bandwidth'] / 1e9:.0f} GB/s"]
    sums = {}
    for tokens in result["tokens"]:
        rows, seconds = [], dict.fromkeys(names, 0.0)
        for linear in linears:
            products = {name: found[tokens, linear["rows"], linear["columns"], name] for name in names}
            label = f"{linear['name']} {linear['rows']} x {linear['columns']}, {linear['count']} of them"
            rows.append([label, *map(_cell, products.values())])
            for name, product in products.items():
                seconds[name] += linear["count"] * product["seconds"]
        sums[tokens] = seconds
        rows.append(["all of them", *(f"{taken * 1e6:.0f}" for taken in seconds.values())])
        parts.append(table([f"{tokens} tokens, us (of the bound)", *names], rows))
    ratios = [
        [f"as dense {baseline}", tokens, *(f"{taken[baseline] / taken[name]:.2f}" for name in names)]
        for baseline in BASELINES
        if baseline in names
        for tokens, taken in sums.items()
    ]
    parts.append(table(["times as fast, all of them", "tokens", *names], ratios))
    parts.append("Quantising the inputs is included, and scaling the outputs where not said otherwise.")
    return "\n\n".join(parts)


def _cell(product: Mapping[str, Any]) -> str:
    share = "" if product["share"] is None else f" ({product['share']:.0%})"
    return f"{product['seconds'] * 1e6:.1f}{share}"
