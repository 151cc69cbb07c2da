"""What Double Sparsity costs in accuracy: shares of the tokens, channels and bits of the labels, as a Markdown table.

    python benchmarks/double_sparsity_accuracy.py MODEL --calibration CAL --text A [--text B] [--device cuda]

Protocol `decode`: the first half of each window is dense context, the second half is scored, each of its positions
reading its share of the tokens. A cell is the increase of perplexity over dense attention in percent, with its standard
error over windows, paired: the windows' difficulty cancels. Columns, by what ranks the tokens:

    r=16      16 channels of the mean query of a group, and of the keys as they are
    r=16, 4b  the same in labels of 4 bits and queries of 8: what artifacts and engines do, by the code that `eval` runs
    exact     all channels as they are: the exact best tokens of the mean query; "all, 4b" in labels
    ... head  a list for each query head, in place of one for a group: reads up to a group's size times as much

Of the calibration only the statistics of attention are read. The weights are the checkpoint's own.
"""

import time
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import Windows, windows_of
from figures import json_option, write_figures
from heavy_channels import attention_by, importances
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from sparsepack.calibration.folder import load
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.scorer import SparseScorer
from sparsepack.eval.standard_error import exp_mean, with_error
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.formats.codecs.labels import encode_labels
from sparsepack.integration.transformers import double_sparsity
from sparsepack.models.records.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.reference.double_sparsity import (
    attend_selected,
    heavy,
    label_queries,
    label_scores,
    select_tokens,
)

_NAME = "double_sparsity_accuracy"
_QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Column:
    """How tokens are ranked.

    channels -- of a head; 0: all
    bits     -- of labels; 0: keys and queries as they are
    per_head -- a list for each query head
    """

    channels: int
    bits: int = 4
    per_head: bool = False

    @property
    def name(self) -> str:
        ranked = f"r={self.channels}" if self.channels else "all" if self.bits else "exact"
        return ranked + (f", {self.bits}b" if self.bits else "") + (", head" if self.per_head else "")


COLUMNS = (
    *(Column(r, bits) for r in (4, 8, 16) for bits in (0, 4)),
    Column(0, 4),
    Column(0, 0),
    Column(16, 4, per_head=True),
    Column(0, 0, per_head=True),
)


@click.command()
@click.argument("model")
@click.option("--calibration", required=True, type=click.Path(path_type=Path))
@click.option("--text", "texts", multiple=True, required=True)
@click.option("--tokens", "shares", multiple=True, type=Fraction, default=("1/4", "1/8", "1/16", "1/32"))
@click.option(
    "--column", "named", multiple=True, type=click.Choice([each.name for each in COLUMNS]), help="Only these."
)
@click.option("--dense", default="0,1", help="Layers that read every token, by commas.")
@click.option("--sinks", default=TokenPolicy.sinks)
@click.option("--recent", default=TokenPolicy.recent)
@click.option("--by", type=click.Choice(["product", "query", "key"]), default="product", help="Importance of channels.")
@click.option("--context", default=8192, help="Tokens of a window.")
@click.option("--windows", default=16, help="Windows per text, evenly spread.")
@click.option("--device", default="cpu")
@json_option
def main(
    model: str,
    calibration: Path,
    texts: tuple[str, ...],
    shares: tuple[Fraction, ...],
    named: tuple[str, ...],
    dense: str,
    sinks: int,
    recent: int,
    by: str,
    context: int,
    windows: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model."""
    subject = open_subject(model, None, device)
    ranked = importances(model, calibration, by)
    columns = [column for column in COLUMNS if not named or column.name in named]
    rows = []
    for text in texts:
        data = windows_of(subject, text, windows, context=context)
        whole = _nll(subject, data)
        print(f"\n{Path(text).name}: {len(whole)} windows of {context}, dense {with_error(exp_mean(whole), 3)}\n")
        print("| tokens | " + " | ".join(column.name for column in columns) + " | seconds |")
        print("|---" * (len(columns) + 2) + "|")
        for share in shares:
            began, cells = time.time(), []
            for column in columns:
                attention = attention_by(ranked, column.channels, dense, TokenPolicy(share, sinks, recent))
                ratio = exp_mean(_nll(subject, data, column, attention) - whole)
                loss = {name: None if of is None else 100 * (of - (name == "value")) for name, of in ratio.items()}
                cells.append(with_error(loss, 2))
                rows.append({"text": text, "tokens": str(share), "column": column.name, "loss_percent": loss})
            print(f"| {share} | " + " | ".join(cells) + f" | {time.time() - began:.0f} |", flush=True)
    tokens = load(calibration).manifest["tokens"]
    print(
        f"\nIn percent. Layers that read every token: {dense or 'none'}; {sinks} first and {recent} last tokens within "
        f"the share. Channels by {by}, calibrated on {tokens['windows']} windows of {tokens['context']}. Computed in "
        f"{subject.precision['dtype']} on {device}."
    )
    write_figures(json_path, rows)


def _nll(
    subject: Subject, data: Windows, column: Column | None = None, attention: SparseAttention | None = None
) -> Tensor:
    """Mean negative log-likelihood of each window's second half, float64 [windows]; dense without a column."""
    model = subject.model
    ours = column is not None and column.bits > 0 and not column.per_head
    if column is not None and attention is not None and not ours:
        AttentionInterface.register(_NAME, partial(_forward, column, attention))
        AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation("sdpa" if column is None else _NAME if not ours else double_sparsity.NAME)
    scorer = SparseScorer(model, subject.family, {}, subject.context, attention=attention if ours else None)
    scores = score_windows(scorer, *data, "dense" if column is None else "decode", second_half=True)
    return scores.nll / scores.targets


def _forward(
    column: Column,
    attention: SparseAttention,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """As `double_sparsity.attention_forward`, for whole windows whose second half is sparse."""
    output, _ = sdpa_attention_forward(module, query, key, value, *mask, **options)
    channels = attention.channels[module.layer_idx]
    if channels is not None:
        first = query.shape[2] // 2
        for row, of_row in enumerate(zip(query[:, :, first:].float(), key.float(), value.float(), strict=True)):
            found = _attend(column, attention.policy, channels.to(query.device), first, *of_row)
            output[row, first:] = found.view(len(found), *output.shape[2:])
    return output, None


def _attend(
    column: Column, policy: TokenPolicy, channels: Tensor, first: int, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """As `runtime.reference.double_sparsity.attend_sparse`."""
    if column.per_head:
        group = len(queries) // len(keys)
        keys, values, channels = (of.repeat_interleave(group, 0) for of in (keys, values, channels))
    outputs, labels = [], encode_labels(heavy(keys, channels))
    for part in torch.split(queries, _QUERIES_AT_ONCE, dim=1):
        last = first + part.shape[1]
        if column.bits:
            scores = label_scores(label_queries(part, channels), *(of[:, :last] for of in labels))
        else:
            mean_query = part.view(len(keys), -1, *part.shape[1:]).mean(1)
            scores = heavy(mean_query, channels) @ heavy(keys[:, :last], channels).transpose(1, 2)
        selected = select_tokens(scores, first, policy)
        outputs.append(attend_selected(part, keys[:, :last], values[:, :last], selected))
        first = last
    return torch.cat(outputs)


if __name__ == "__main__":
    main()
