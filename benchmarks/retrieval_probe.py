"""Whether a model still finds a sentence far back in its context when it reads a share of the tokens: by depth.

    python benchmarks/retrieval_probe.py MODEL --calibration CAL --text A [--device cuda]

A trial takes a window of held-out text and a sentence from elsewhere in it, plants the sentence at some depth, and asks
for it at the end by its first tokens. The right continuation competes with those of other sentences, as many tokens
long. The context is dense, as a prompt is; the asked tokens and the continuation read their share (protocol `decode`).

    hit       the right continuation is the likeliest of the candidates; chance is one of their number
    greedy    every token of it is the likeliest of the vocabulary: greedy decoding would have said it
    nats      its mean log-likelihood by token, with its standard error over trials; below dense: what is lost, paired

The row `absent` is of contexts without the sentence: what the beginning alone tells of its continuation.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import windows_of
from torch import Tensor

from sparsepack.calibrate.channels import importance
from sparsepack.calibrate.folder import load
from sparsepack.eval.standard_error import mean, with_error
from sparsepack.eval.subject import open_subject
from sparsepack.models.checkpoint import open_checkpoint
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.double.attention import attach, sparse_rows

_SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.!?\n]{60,300}[.!?]")


@dataclass(frozen=True)
class Found:
    """What became of one trial."""

    hit: bool
    greedy: bool
    nats: float


@click.command()
@click.argument("model")
@click.option("--calibration", required=True, type=click.Path(path_type=Path))
@click.option("--text", required=True)
@click.option("--tokens", "shares", multiple=True, type=Fraction, default=("1/8", "1/16", "1/32"))
@click.option("--channels", default=16)
@click.option("--dense", default="0,1", help="Layers that read every token, by commas.")
@click.option("--sinks", default=TokenPolicy.sinks)
@click.option("--recent", default=TokenPolicy.recent)
@click.option("--depth", "depths", multiple=True, type=float, default=(0.05, 0.25, 0.5, 0.75, 0.95))
@click.option("--context", default=8192, help="Tokens of a trial.")
@click.option("--asked", default=8, help="Tokens of the sentence that are given.")
@click.option("--said", default=8, help="Tokens of its continuation.")
@click.option("--candidates", default=16)
@click.option("--trials", default=64, help="Windows, each with a sentence of its own.")
@click.option("--seed", default=0)
@click.option("--device", default="cpu")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
@torch.inference_mode()
def main(
    model: str,
    calibration: Path,
    text: str,
    shares: tuple[Fraction, ...],
    channels: int,
    dense: str,
    sinks: int,
    recent: int,
    depths: tuple[float, ...],
    context: int,
    asked: int,
    said: int,
    candidates: int,
    trials: int,
    seed: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model."""
    subject = open_subject(model, None, device)
    statistics = load(calibration)
    statistics.check_model(open_checkpoint(model))
    left = {int(layer) for layer in dense.split(",") if layer}
    ranked = [each.product.topk(channels).indices.sort().values for each in importance(statistics)]
    chosen = tuple(None if layer in left else best for layer, best in enumerate(ranked))
    policies = [SparseAttention(TokenPolicy(share, sinks, recent), chosen) for share in shares]
    inputs, _ = windows_of(subject, text, trials, context=context)
    random = torch.Generator().manual_seed(seed)
    sentences = _sentences(subject.tokenizer, inputs, asked + said)
    found: dict[tuple[str, str], list[Found]] = {}
    for number, window in enumerate(inputs):
        others = [sentence for at, sentence in sentences if at != number]
        picked = torch.randperm(len(others), generator=random)[:candidates].tolist()
        rows = torch.stack([others[n] for n in picked])  # the first is planted; all go on from its beginning
        rows[:, :asked] = rows[0, :asked]
        room = context - 2 * (asked + said)
        for depth in (None, *depths):
            at = int((depth or 0) * room)
            planted = [rows[0]] if depth is not None else []
            prompt = torch.cat([window[:at], *planted, window[at:room]])
            place = "absent" if depth is None else f"{depth:.0%}"
            for name, result in _tried(subject.model, prompt.to(device), rows.to(device), asked, policies):
                found.setdefault((place, name), []).append(result)
    _print(found, [place for place, name in found if name == "dense"], shares, candidates)
    print(
        f"\n{len(inputs)} trials of {context} tokens of {Path(text).name}, {candidates} candidates (chance "
        f"{1 / candidates:.1%}), {asked} tokens asked and {said} said; {channels} channels in 4 bits, layers that read "
        f"every token: {dense or 'none'}; {sinks} first and {recent} last tokens within the share. Computed in "
        f"{subject.precision['dtype']} on {device}."
    )
    if json_path:
        results = [
            {"depth": place, "tokens": name, "trials": [vars(each) for each in of]}
            for (place, name), of in found.items()
        ]
        json_path.write_text(json.dumps(results, indent=1))


def _sentences(tokenizer: Any, inputs: Tensor, length: int) -> list[tuple[int, Tensor]]:
    """The first tokens of long sentences, and the window that each is from; those that begin alike are left out."""
    found: dict[tuple[int, ...], tuple[int, Tensor]] = {}
    for number, window in enumerate(inputs):
        for match in _SENTENCE.finditer(tokenizer.decode(window, skip_special_tokens=True)):
            ids = tokenizer(" " + match[0], add_special_tokens=False)["input_ids"][:length]
            if len(ids) == length:
                found.setdefault(tuple(ids[:4]), (number, torch.tensor(ids)))
    return list(found.values())


def _tried(
    model: Any, prompt: Tensor, rows: Tensor, asked: int, policies: Sequence[SparseAttention]
) -> list[tuple[str, Found]]:
    """What the model makes of the rows [candidates, asked + said] after a prompt, densely and by each policy."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with sparse_rows(torch.tensor([len(prompt)])):
        model.model(prompt[None], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(rows))
    results = []
    for name, attention in [("dense", None), *((str(each.policy.tokens), each) for each in policies)]:
        if attention is not None:
            attach(model, attention)
        starts = torch.full((len(rows),), rows.shape[1] if attention is None else 0)
        with sparse_rows(starts):
            logits = model(rows, past_key_values=cache, use_cache=True).logits[:, asked - 1 : -1].float()
        cache.crop(-rows.shape[1])
        log_probs = logits.log_softmax(-1)
        of = log_probs.gather(-1, rows[:, asked:, None])[..., 0]  # [candidates, said]
        greedy = bool((log_probs[0].argmax(-1) == rows[0, asked:]).all())
        results.append((name, Found(int(of.sum(-1).argmax()) == 0, greedy, float(of[0].mean()))))
    model.set_attn_implementation("sdpa")
    return results


def _print(
    found: dict[tuple[str, str], list[Found]], places: list[str], shares: Sequence[Fraction], candidates: int
) -> None:
    names = ["dense", *map(str, shares)]
    print("| depth | " + " | ".join(f"{what}, {name}" for what in ("hit", "greedy", "nats") for name in names) + " |")
    print("|---" * (3 * len(names) + 1) + "|")
    for place in places:
        of = {name: found[place, name] for name in names}
        cells = [f"{sum(each.hit for each in of[name]) / len(of[name]):.0%}" for name in names]
        cells += [f"{sum(each.greedy for each in of[name]) / len(of[name]):.0%}" for name in names]
        before = torch.tensor([each.nats for each in of["dense"]], dtype=torch.float64)
        cells.append(with_error(mean(before), 2))
        for name in names[1:]:
            lost = torch.tensor([each.nats for each in of[name]], dtype=torch.float64) - before
            cells.append(with_error(mean(lost), 3))
        print(f"| {place} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
