"""Do engines that leave out inactive neurons say what the dense model says? Do slots serve what is simulated?

    python benchmarks/neuron_agreement.py m.gguf --text TEXT [--sessions 6] [--cached 0.3] [--backend cpu]
    python benchmarks/neuron_agreement.py m.gguf --text TEXT --backend cuda --placement none,all,random,default

m.gguf is of the format neuron-q4_k. Sessions are stretches of other documents, as in a trace. Of each the prompt passes
dense, then every token is a step of its own. Logits of each step are compared with those of the reference engine that
skips nothing, and with those of the engine's own backend that skips nothing: these two differ in arithmetic, too.

Placements are `none`: nobody has a slot; `all`; `random`: --cached of the neurons, which stay; and `default`: what
--policy gives and moves. Each is also played by the simulator, on who was active in the engine's own steps. Ends with
an error where the counts differ, or where an engine that skips has another likeliest token than the dense one of its
own backend in more than one position of a thousand: what the backend's arithmetic changes is no matter of neurons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from sparsepack.files.text import read_text
from sparsepack.formats.mlp_kinds import MLP_RECORDS
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.formats.stock import stock_tokenizer
from sparsepack.models.tokenizer.windows import session_windows
from sparsepack.placement.links import HALVES
from sparsepack.placement.names import ONLINE
from sparsepack.placement.placement import HitCounts, Placement, budget_of
from sparsepack.placement.policies import POLICIES, Policy, Start, play
from sparsepack.progress import progress
from sparsepack.runtime.backends import backend_named
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

LEAST_AGREEMENT = 0.999
DENSE = "dense"


@dataclass
class Compared:
    """Sums over positions of what two engines say."""

    positions: int = 0
    same_top: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Logits [S, vocabulary] of the same positions."""
        theirs, ours = (logits.double().log_softmax(-1) for logits in (expected, found))
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)
        self.positions += len(found)
        self.same_top += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.largest = max(self.largest, float(divergence.max()))
        self.total += float(divergence.sum())

    @property
    def cells(self) -> list[str]:
        """The cells of a row of the table."""
        share = f"{100 * self.same_top / self.positions:.3f} % ({self.positions - self.same_top} others)"
        return [f"{self.positions:,}", share, f"{self.largest:.2e}", f"{self.total / self.positions:.2e}"]


class Watched:
    """A policy that writes down who was active, token by token. cached -- the share of the neurons with slots"""

    def __init__(self, policy: Policy, cached: float) -> None:
        self.policy, self.cached, self.rows = policy, cached, list[np.ndarray]()

    def begin(self, start: Start) -> tuple[Placement, Any]:
        self.rows.clear()
        placement, mover = self.policy(start)

        def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
            self.rows.append(needed.copy())
            return resident if mover is None else mover(token, needed, resident)

        return placement, move


def anybody(start: Start) -> tuple[Placement, None]:
    """A policy by which any neurons have slots, always the same ones."""
    chosen = np.random.default_rng(0).permutation(start.frequency.size)[: start.slots]
    resident = np.zeros(start.frequency.size, np.bool_)
    resident[chosen] = True
    return Placement(resident.reshape(start.frequency.shape), 1), None


def placements_of(names: str, cached: float, policy: str) -> dict[str, Watched]:
    """Policies that are watched, by the names of `--placement`."""
    static = POLICIES["static"].begin
    known = {
        "none": Watched(static, 0.0),
        "all": Watched(static, 1.0),
        "random": Watched(anybody, cached),
        "default": Watched(POLICIES[policy].begin, cached),
    }
    if unknown := [name for name in names.split(",") if name not in known]:
        raise click.ClickException(f"--placement {unknown[0]}: expected {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


def engines_of(
    packed: PackedModel, watched: Mapping[tuple[str, str], Watched], tokens: int
) -> dict[tuple[str, str], Engine]:
    """By backend and name: the dense reference, and of each backend a dense one, one that skips, and one for each
    placement."""
    backends = dict.fromkeys(backend for backend, _ in watched)
    gpu = any("cuda" in backend_named(backend).devices for backend in backends)
    options = EngineOptions(device="cuda" if gpu else "cpu", context=tokens)
    engines = {("reference", DENSE): Engine(packed, options, backend="reference", dense=True)}
    for backend in backends:
        own = replace(options, backend=backend)
        engines[backend, DENSE] = Engine(packed, own, dense=True)
        engines[backend, "by neurons"] = Engine(packed, own)
    for (backend, name), policy in watched.items():
        # Equal links: work for both sides, whatever tune found.
        placed = replace(options, backend=backend, cached=policy.cached, begin=policy.begin, links=HALVES)
        engines[backend, name] = Engine(packed, placed)
    return engines


def said(engine: Engine, ids: list[int], prompt: int) -> torch.Tensor:
    """The logits after each token beyond the prompt: [tokens, vocabulary]. An engine that skips takes steps."""
    if engine.dense:
        return engine.teacher_forced(ids, prompt)[prompt:].cpu()
    engine.reset()
    engine.prefill(ids[:prompt])
    return torch.stack([engine.step(id) for id in ids[prompt:]]).cpu()


def simulated(packed: PackedModel, watched: Watched, prompt: int) -> HitCounts:
    """What the simulator says of the session that was watched."""
    blocks = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    frequency = np.stack([block.frequency[block.order.argsort()].double().numpy() for block in blocks])
    return play(watched.policy, Start(frequency, budget_of(watched.cached, frequency), np.stack(watched.rows), prompt))


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--text", required=True)
@click.option("--sessions", default=6, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Of a session.")
@click.option("--prompt", default=256, show_default=True, help="Its first tokens, which are not compared.")
@click.option("--cached", default=0.3, show_default=True)
@click.option("--policy", default="slow", show_default=True, type=click.Choice(ONLINE))
@click.option("--placement", default="default", show_default=True, help="With commas: none, all, random, default.")
@click.option("--backend", "backends", multiple=True, default=("cpu", "reference"), show_default=True)
def main(
    path: Path,
    text: str,
    sessions: int,
    tokens: int,
    prompt: int,
    cached: float,
    policy: str,
    placement: str,
    backends: tuple[str, ...],
) -> None:
    """Print what each engine agrees on with the dense ones, and what had slots beside the simulator's counts."""
    packed = read_packed(path)
    windows, _ = session_windows(stock_tokenizer(packed), read_text(text), tokens, sessions)
    watched = {
        (backend, name): each for backend in backends for name, each in placements_of(placement, cached, policy).items()
    }
    engines = engines_of(packed, watched, tokens)
    compared: dict[tuple[str, str, str], Compared] = {}
    rows, wrong = [], []
    with progress("comparing", len(windows) * len(engines)) as advance:
        for number, ids in enumerate(windows.tolist()):
            logits = {}
            for key, engine in engines.items():
                logits[key] = said(engine, ids, prompt)
                advance()
            for backend, name in engines:
                for against in dict.fromkeys(("reference", backend)):
                    if (backend, name) != (against, DENSE):
                        row = compared.setdefault((backend, name, against), Compared())
                        row.add(logits[against, DENSE], logits[backend, name])
            for (backend, name), policy_of in watched.items():
                engine, expected = engines[backend, name], simulated(packed, policy_of, prompt)
                counted = sum(n for (_, part), n in engine.counts().active.items() if part == MLP_RECORDS)
                rows.append([backend, name, number, *cells(engine.hit_counts), *cells(expected)])
                if engine.hit_counts != expected or counted != expected.needed:
                    wrong.append(
                        f"session {number}, {backend}, {name}: {engine.hit_counts}, the simulator says {expected}"
                    )
    head = ["backend", "engine", "against the dense", "positions", "same likeliest token", "largest KL", "mean KL"]
    click.echo(markdown(Table(head, [[*key, *each.cells] for key, each in compared.items()])))
    both = [f"{name}{of}" for of in ("", ", simulated") for name in ("needed", "with slots", "moves")]
    counts = markdown(Table(["backend", "placement", "session", *both], rows))
    click.echo(f"\n{100 * cached:g} % with slots, {policy}\n\n{counts}")
    for (backend, name, against), each in compared.items():
        if against == backend and each.same_top < LEAST_AGREEMENT * each.positions:
            wrong.append(f"{backend}, {name}: the likeliest token is not that of the dense {against} too often")
    if wrong:
        raise click.ClickException("; ".join(wrong))


def cells(hits: HitCounts | None) -> list[str]:
    """The cells of a row of the table."""
    assert hits is not None
    return [f"{hits.needed:,}", f"{hits.hits:,}", f"{hits.moves:,}"]


if __name__ == "__main__":
    main()
