"""The tables of `cpu_decode.py`."""

from typing import Any

import cpu_setting

from sparsepack.tables import Table, markdown

_STEADY = 1.3
"""The fastest round over the slowest; beyond it something else ran on the machine, and only the best rounds compare."""


def show(result: dict[str, Any]) -> str:
    """All tables, and a warning where rounds differ too much to be quoted."""
    plan = result["plan"]
    return "\n".join(
        [
            cpu_setting.setting_line(result["setting"]),
            f"\nDecoding {plan['generated']} tokens after {plan['prompt']}, medians of {plan['rounds']} rounds\n",
            _decode(result["decode"]),
            *_disturbed(result["decode"]),
            f"\nPrefill of {plan['prefill']} tokens, medians of {plan['prefill_rounds']} rounds\n",
            _prefill(result["prefill"]),
            f"\nLoading and memory with a context of {result['context']}\n",
            _load(result["load"]),
        ]
    )


def _decode(rows: list[dict[str, Any]]) -> str:
    head = ["threads", "engine", "tokens/s", "range", "x llama.cpp", "best / best", "skipped", "MB/token"]
    cells = [
        [
            row["threads"],
            row["engine"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['range'][0]:.1f} to {row['range'][1]:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['best_ratio']:.2f}",
            f"{row['skipped']:.1%}",
            f"{row['bytes_per_token'] / 1e6:.0f}",
            f"{row['bytes_per_token'] * row['tokens_per_second'] / 1e9:.1f}",
            f"{row['bandwidth_share']:.0%} of {row['read_bandwidth'] / 1e9:.1f}",
            f"{row['relative_error']:.1e}",
        ]
        for row in rows
    ]
    return markdown(Table([*head, "GB/s needed", "of bandwidth, GB/s", "error of logits"], cells))


def _disturbed(rows: list[dict[str, Any]]) -> list[str]:
    found = [
        f"{row['engine']} at {row['threads']} threads: {row['range'][0]:.1f} to {row['range'][1]:.1f}"
        for row in rows
        if row["range"][1] > _STEADY * row["range"][0]
    ]
    return ["", "Disturbed, not to be quoted: " + "; ".join(found)] if found else []


def _prefill(rows: list[dict[str, Any]]) -> str:
    head = ["threads", "engine", "tokens/s", "x llama.cpp"]
    return markdown(
        Table(
            head,
            [[row["threads"], row["engine"], f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}"] for row in rows],
        )
    )


def _load(rows: list[dict[str, Any]]) -> str:
    head = ["engine", "load, s", "read file, s", "load / read", "peak, MiB", "before, MiB"]
    cells = [
        [
            row["engine"],
            f"{row['load_seconds']:.2f}",
            f"{row['read_seconds']:.2f}",
            f"{row['load_over_read']:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['before_bytes'] / 2**20:.0f}",
            f"{row['peak_over_file_and_cache']:.2f}",
            f"{row['added_over_file_and_cache']:.2f}",
        ]
        for row in rows
    ]
    return markdown(Table([*head, "peak / (file + KV)", "added / (file + KV)"], cells))
