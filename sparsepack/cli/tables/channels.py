"""What a calibration knows of attention, its channels and its tokens, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.tables import Table, markdown


def channels_table(result: Mapping[str, Any]) -> str:
    """What `inspect` found in a calibration about the channels of attention, and about the tokens that it needs."""
    report, tokens = result["attention_channels"], result["attention_tokens"]
    head_dim, compared = report["head_dim"], report["compared"]
    rows = [
        [
            layer,
            *map(_percent, row["share"]),
            *(_percent(row["heads_agree"][name]) for name in ("query", "key", "product")),
            _percent(row["key_agrees"]),
            *map(_percent, tokens["layers"][layer]["missed"]),
        ]
        for layer, row in enumerate(report["layers"])
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
        blocks = f"block{'s' * (len(report['alike']) > 1)} {', '.join(map(str, report['alike']))}"
        notes.append(f"note: the heads of {blocks} have nearly the same heavy channels, as if heads were mixed up")
    columns = ["block", *tops, "heads, by q", "by k", "by q*k", "k and q*k", *misses]
    return markdown(Table(columns, rows, "\n".join(lines), notes))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
