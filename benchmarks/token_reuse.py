"""Who finds the tokens that a step reads before it begins: steps before it, or a guess from the layer before.

    python benchmarks/token_reuse.py MODEL --calibration CAL --text A [--tokens 1/16] [--steps 512]

Of one window of held-out text, for each layer that selects tokens by labels of 4 bits, the share of what a step reads
that is found by the step before; by the guess of Double Sparsity-Offload (section 5), the layer's own norm and query
rows on what enters the layer before; and among once, twice and four times as many tokens that were read last. The
cosine is that of what enters the layer before and this one.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import windows_of
from heavy_channels import attention_by, importances
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sparsepack.eval.subject import open_subject
from sparsepack.formats.codecs.labels import encode_labels
from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.reference.double_sparsity import heavy, label_queries, label_scores, select_tokens
from sparsepack.tables import Table, markdown

NAME = "token_reuse"
TIMES = (1, 2, 4)
WARM = 64
"""Steps until what was read last is not counted."""


@click.command()
@click.argument("model")
@click.option("--calibration", required=True, type=click.Path(path_type=Path))
@click.option("--text", required=True)
@click.option("--tokens", type=Fraction, default="1/16")
@click.option("--channels", default=16)
@click.option("--dense", default="0,1", help="Layers that read every token, by commas.")
@click.option("--context", default=8192)
@click.option("--first", default=6000, help="Position of the first step.")
@click.option("--steps", default=512)
@torch.no_grad()
def main(
    model: str,
    calibration: Path,
    text: str,
    tokens: Fraction,
    channels: int,
    dense: str,
    context: int,
    first: int,
    steps: int,
) -> None:
    """Print the table for one model of the Llama family."""
    subject = open_subject(model, None, "cpu")
    stock, last = subject.model, first + steps
    attention = attention_by(importances(model, calibration, "product"), channels, dense, TokenPolicy(tokens, 4, 64))
    heads: dict[int, tuple[Tensor, Tensor]] = {}
    entering: dict[int, Tensor] = {}

    def forward(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        heads[module.layer_idx] = query[0].float(), key[0].float()
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    stock.set_attn_implementation(NAME)
    blocks = stock.model.layers
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(
            lambda _, given, number=number: entering.__setitem__(number, given[0][0].float())
        )
    stock(windows_of(subject, text, 1, context=context)[0][:1].long())
    cos, sin = stock.model.rotary_emb(entering[0][None], torch.arange(context)[None])
    rows = []
    for layer, heavy_channels in enumerate(attention.channels):
        if heavy_channels is None or layer == 0:
            continue
        query, key = heads[layer]
        labels = encode_labels(heavy(key[:, :last], heavy_channels))

        def selected(queries: Tensor, of: Tensor = heavy_channels, labels: Any = labels) -> Tensor:
            return select_tokens(label_scores(label_queries(queries, of), *labels), first, attention.policy)

        read = selected(query[:, first:last])
        x = blocks[layer].input_layernorm(entering[layer - 1])[None, first:last]
        guess = blocks[layer].self_attn.q_proj(x).view(1, steps, len(query), -1).transpose(1, 2)
        guess, _ = apply_rotary_pos_emb(guess, guess, cos[:, first:last], sin[:, first:last])
        count = read.sum(-1).float()
        before = ((read[:, 1:] & read[:, :-1]).sum(-1) / count[:, 1:]).mean()
        guessed = ((read & selected(guess[0].float())).sum(-1) / count).mean()
        cosine = torch.cosine_similarity(entering[layer - 1][first:last], entering[layer][first:last]).mean()
        found = [float(before), float(guessed), *(among_last(read, times) for times in TIMES)]
        rows.append([str(layer), *(f"{share:.0%}" for share in found), f"{cosine:.2f}"])
    head = ["layer", "the step before", "guess", *(f"{times}x read last" for times in TIMES), "cosine"]
    click.echo(markdown(Table(head, rows)))


def among_last(read: Tensor, times: int) -> float:
    """The share of what steps read, bool [kv_heads, steps, tokens], that is among so many times as many read last."""
    used = torch.full((read.shape[0], read.shape[2]), -1)
    shares = []
    for step, now in enumerate(read.unbind(1)):
        count = int(now[0].sum())
        oldest = used.topk(min(times * count, used.shape[1]), dim=-1).values[:, -1:]
        there = (used >= oldest) & (used >= 0)
        shares.append(float((now & there).sum() / now.sum()))
        used[now] = step
    return sum(shares[WARM:]) / len(shares[WARM:])


if __name__ == "__main__":
    main()
