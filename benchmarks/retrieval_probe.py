"""Whether a model still finds a sentence far back in its context when it reads a share of the tokens: by depth.

    python benchmarks/retrieval_probe.py MODEL --calibration CAL --text A [--device cuda]

A trial takes a window of held-out text, puts a sentence from elsewhere in it at some depth, and asks for it at the end
by its first tokens. The right continuation competes with those of other sentences, as many tokens long. The context is
dense, as a prompt is; the asked tokens and the continuation read their share (protocol `decode`).

    gain  how much likelier the right continuation is than after the same context without the sentence: nats by token,
          with their standard error over trials; what sparse attention loses of the dense one's, paired
    hit   the right one gains most of the candidates: by chance, one of their number. Small models copy little, so that
          what sounds likely anyway would hide it; the gain does not count that
"""

import copy
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import windows_of
from figures import json_option, write_figures
from heavy_channels import attention_by, importances
from torch import Tensor

from sparsepack.eval.standard_error import mean, with_error
from sparsepack.eval.subject import open_subject
from sparsepack.integration.transformers.double_sparsity import attach, sparse_rows
from sparsepack.models.records.sparse_attention import SparseAttention, TokenPolicy

_SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.!?\n]{60,300}[.!?]")


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
@click.option("--asked", default=16, help="Tokens of the sentence that are given.")
@click.option("--said", default=8, help="Tokens of its continuation.")
@click.option("--candidates", default=16)
@click.option("--trials", default=64, help="Windows, each with a sentence of its own.")
@click.option("--seed", default=0)
@click.option("--device", default="cpu")
@json_option
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
    fewest = TokenPolicy.min_context + asked + said
    if context < fewest:
        raise click.UsageError(f"--context {context}: expected {fewest} or more; fewer tokens are all read")
    ranked = importances(model, calibration)
    policies = [attention_by(ranked, channels, dense, TokenPolicy(share, sinks, recent)) for share in shares]
    inputs, _ = windows_of(subject, text, trials, context=context)
    random = torch.Generator().manual_seed(seed)
    sentences = _sentences(subject.tokenizer, inputs, asked + said)
    rows_of = []
    for number in range(len(inputs)):
        others = [sentence for at, sentence in sentences if at != number]
        picked = torch.randperm(len(others), generator=random)[:candidates].tolist()
        rows = torch.stack([others[n] for n in picked])  # the first is planted; all go on from its beginning
        rows[:, :asked] = rows[0, :asked]
        rows_of.append(rows.to(device))
    prompts = inputs[:, : context - asked - said].to(device)

    def likelihoods(depth: float | None) -> list[dict[str, Tensor]]:
        found = []
        for prompt, rows in zip(prompts, rows_of, strict=True):
            if depth is not None:
                at = int(depth * (len(prompt) - asked - said))
                prompt = torch.cat([prompt[:at], rows[0], prompt[at + asked + said :]])
            found.append(_likelihoods(subject.model, prompt, rows, asked, policies))
        return found

    names = ["dense", *(str(policy.policy.tokens) for policy in policies)]
    without, results = likelihoods(None), []
    _print_head(names)
    for depth in depths:
        pairs = list(zip(likelihoods(depth), without, strict=True))
        gains = {name: torch.stack([of[name] - base[name] for of, base in pairs]) for name in names}
        _print_row(depth, gains)
        results += [{"depth": depth, "tokens": name, "gains": of.tolist()} for name, of in gains.items()]
    print(
        f"\n{len(inputs)} trials of {context} tokens of {Path(text).name}, {candidates} candidates (chance "
        f"{1 / candidates:.1%}), {asked} tokens asked and {said} said; {channels} channels in 4 bits, layers that read "
        f"every token: {dense or 'none'}; {sinks} first and {recent} last tokens within the share. Computed in "
        f"{subject.precision['dtype']} on {device}."
    )
    write_figures(json_path, results)


def _sentences(tokenizer: Any, inputs: Tensor, length: int) -> list[tuple[int, Tensor]]:
    """The first tokens of long sentences, and the window that each is from; those that begin alike are left out."""
    found: dict[tuple[int, ...], tuple[int, Tensor]] = {}
    for number, window in enumerate(inputs):
        for match in _SENTENCE.finditer(tokenizer.decode(window, skip_special_tokens=True)):
            ids = tokenizer(" " + match[0], add_special_tokens=False)["input_ids"][:length]
            if len(ids) == length:
                found.setdefault(tuple(ids[:4]), (number, torch.tensor(ids)))
    return list(found.values())


def _likelihoods(
    model: Any, prompt: Tensor, rows: Tensor, asked: int, policies: Sequence[SparseAttention]
) -> dict[str, Tensor]:
    """Mean log-likelihood by token of each continuation after a prompt, dense and by each policy: float64 [rows]. What
    is asked is read once for all of them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model.model(prompt[None], past_key_values=cache, use_cache=True)
    found = {}
    for name, attention in [("dense", None), *((str(each.policy.tokens), each) for each in policies)]:
        if attention is not None:
            attach(model, attention)
        with sparse_rows(torch.zeros(1, dtype=torch.int64)):
            first = model(rows[:1, :asked], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        each = copy.copy(cache)
        each.layers = [_for_each(layer, len(rows)) for layer in cache.layers]
        with sparse_rows(torch.zeros(len(rows), dtype=torch.int64)):
            later = model(rows[:, asked:-1], past_key_values=each, use_cache=True).logits
        cache.crop(-asked)
        logits = torch.cat([first.expand(len(rows), -1, -1), later], dim=1).float()
        of = logits.log_softmax(-1).gather(-1, rows[:, asked:, None])[..., 0]  # [rows, said]
        found[name] = of.double().mean(-1).cpu()
    return found


def _for_each(layer: Any, rows: int) -> Any:
    """A layer of a cache of one text for several that go on from it; what they append goes to new tensors."""
    each = copy.copy(layer)
    each.keys, each.values = (of.expand(rows, -1, -1, -1) for of in (layer.keys, layer.values))
    return each


def _print_head(names: Sequence[str]) -> None:
    heads = [*(f"hit, {name}" for name in names), "gain, dense", *(f"gain lost, {name}" for name in names[1:])]
    print("| depth | " + " | ".join(heads) + " |")
    print("|---" * (2 * len(names) + 1) + "|", flush=True)


def _print_row(depth: float, gains: Mapping[str, Tensor]) -> None:
    """gains -- by name, dense first: [trials, candidates], of which the first is the right one"""
    cells = [f"{(of.argmax(-1) == 0).double().mean():.0%}" for of in gains.values()]
    dense, *others = (of[:, 0] for of in gains.values())
    cells.append(with_error(mean(dense), 3))
    cells += [with_error(mean(dense - of), 3) for of in others]
    print(f"| {depth:.0%} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
