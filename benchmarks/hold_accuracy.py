"""What `--hold` makes of the share that is skipped, and what following the text costs, as one Markdown table a text.

    python benchmarks/hold_accuracy.py ARTIFACT --text A --text B [--windows 16] [--backend cpu] [--device cpu]

Windows of 2,048 tokens, evenly spread over the first thousand; the first half of each is read dense, the second decoded
token by token and scored. Beside thresholds as they are stand held ones at several gains, and thresholds times the one
number that held ones had on average: what that loses less is the price of following. Losses are of perplexity, paired,
over thresholds as they are, each with its standard error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import torch

from sparsepack.files.text import read_text
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.tokenizer.windows import tokenise
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.generate import open_tokenizer
from sparsepack.runtime.hold import GAIN_TOKENS, Hold, hold_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

CONTEXT, BEGINNING, MOST_WINDOWS = 2048, 64, 1000


@dataclass(frozen=True)
class Scored:
    """A text decoded in one way: of each window the mean loss of a token; the shares that the first tokens skipped and
    the later ones; and the logarithms of the scales of the later ones."""

    losses: torch.Tensor
    beginnings: torch.Tensor
    later: torch.Tensor
    scales: torch.Tensor

    @property
    def share(self) -> float:
        """Of all tokens."""
        rest = CONTEXT // 2 - BEGINNING
        return float((BEGINNING * self.beginnings + rest * self.later).mean() / (CONTEXT // 2))


def fixed(hold: Hold, scale: float) -> Hold:
    """Thresholds times one number, from the second token on."""
    return replace(hold, first=0.0, last=0.0, least=scale, most=scale)


@torch.no_grad()
def scored(engine: Engine, hold: Hold | None, windows: Sequence[Sequence[int]]) -> Scored:
    """Decode the second halves of windows."""
    if hold is not None:
        engine._decoder.hold(hold)
    losses, beginnings, later, scales = [], [], [], []
    for window in windows:
        engine.reset()
        engine.prefill(window[: CONTEXT // 2])
        total, logs, since = 0.0, [], engine.counts()
        for at in range(CONTEXT // 2, CONTEXT):
            logits = engine.step(window[at])
            total += float(torch.logsumexp(logits, 0) - logits[window[at + 1]])
            if at == CONTEXT // 2 + BEGINNING - 1:
                beginnings.append(_share(engine, since))
                since = engine.counts()
            elif at >= CONTEXT // 2 + BEGINNING:
                logs.append(math.log(engine.scales[0]) if engine.scales else 0.0)
        losses.append(total / (CONTEXT // 2))
        later.append(_share(engine, since))
        scales.append(logs)
    return Scored(*(torch.tensor(values, dtype=torch.float64) for values in (losses, beginnings, later, scales)))


def _share(engine: Engine, since: object) -> float:
    found = engine.skipped(since)  # type: ignore[arg-type]
    assert found is not None
    return found.of_sparse_sites


def windows_of(packed: PackedModel, text: str, count: int) -> list[list[int]]:
    """Windows of the first thousand of a text, with BOS before each and the last target behind it."""
    ids = tokenise(open_tokenizer(packed.tokenizer_json), read_text(text), MOST_WINDOWS * CONTEXT).tolist()
    chosen = torch.linspace(0, len(ids) // CONTEXT - 1, count).long().tolist()
    assert packed.architecture.bos is not None
    return [[packed.architecture.bos, *ids[n * CONTEXT : (n + 1) * CONTEXT]] for n in chosen]


@click.command()
@click.argument("artifact")
@click.option("--text", "texts", multiple=True, required=True)
@click.option("--windows", default=16)
@click.option("--gain", "gains", multiple=True, type=(float, float), default=((0.15, 0.01), (0.15, 0.03), (0.1, 0.1)))
@click.option("--backend", default="cpu")
@click.option("--device", default="cpu")
@click.option("--threads", type=int)
def main(
    artifact: str,
    texts: tuple[str, ...],
    windows: int,
    gains: tuple[tuple[float, float], ...],
    backend: str,
    device: str,
    threads: int | None,
) -> None:
    packed = read_packed(artifact)
    held, options = hold_of(packed), EngineOptions(device, CONTEXT, backend=backend, threads=threads)
    for text in texts:
        chosen, rows = windows_of(packed, text, windows), []
        plain = scored(Engine(packed, options), None, chosen)
        rows.append(_row("as they are", plain, plain, held.target))
        found = {gain: scored(Engine(packed, options), _gain(held, *gain), chosen) for gain in gains}
        scale = math.exp(float(found[gains[0]].scales.mean()))
        once = scored(Engine(packed, options), fixed(held, scale), chosen)
        rows.append(_row(f"times {scale:.3f}", once, plain, held.target))
        for (first, last), each in found.items():
            rows.append(_row(f"held, gain {first:g} to {last:g}", each, plain, held.target))
        heads = ["thresholds", "skipped", f"first {BEGINNING}", "later", "worst window", "scale varies by", "loss"]
        click.echo(markdown(f"{text}, target {held.target:g}, {windows} windows", Table(heads, rows)))


def _gain(hold: Hold, first: float, last: float) -> Hold:
    return replace(hold, first=first, last=last, over=GAIN_TOKENS)


def _row(name: str, found: Scored, plain: Scored, target: float) -> list[str]:
    more = 100 * (found.losses - plain.losses)
    error = float(more.std()) / len(more) ** 0.5
    worst = max(found.later.tolist(), key=lambda share: abs(share - target))
    return [
        name,
        f"{found.share:.4f}",
        f"{float(found.beginnings.mean()):.4f}",
        f"{float(found.later.mean()):.4f}",
        f"{worst:.4f}",
        f"{100 * float(found.scales.std(1).mean()):.1f} %",
        f"{float(more.mean()):+.2f} % +- {error:.2f}",
    ]


if __name__ == "__main__":
    main()
