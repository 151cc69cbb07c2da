"""Who is active in models for which there is no trace: a short trace of a small model, tiled.

    sparsepack calibrate MODEL --text CALIBRATION_TEXT --context 1024 --samples 40 -o cal
    sparsepack trace MODEL --text TEXT --sessions 6 --tokens 480 --prompt 64 -o trace
    python benchmarks/replayed.py cal trace --session N    # makes what is carried

N is the session whose density is nearest to 0.135.

Block b of L takes its activity from block 8 b / L of books-26m-relu, and each of its neurons from one neuron there: a
random order of all of that block's neurons, then another one, until all neurons have theirs. So every block keeps its
share of active neurons, and every neuron how often it is active and how long it stays so.
"""

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from sparsepack.tracing.trace import calibration_or_trace, load, neuron_counts

CARRIED = Path(__file__).parent / "results" / "books-26m-relu.activity.npz"
OTHER = Path(__file__).parent / "results" / "books-26m-relu.wikitext2.npz"
"""The same model, with the same frequencies, from books, on a text of another kind: a session of WikiText-2.
Made like the other, with `--text wikitext2.test.txt.xz` and the other's calibration."""


@dataclass(frozen=True, eq=False)
class Activity:
    """Who is active for each token of a session.

    frequency -- float64 [blocks, neurons]: how often each neuron is active elsewhere, falling in each block
    bits      -- uint8 [tokens, blocks, neurons / 8, rounded up], the lowest bit first
    """

    frequency: np.ndarray
    bits: Tensor

    @property
    def density(self) -> float:
        """The share of the neurons that a token needs."""
        return float(np.bitwise_count(self.bits.numpy()).sum() / len(self.bits) / self.frequency.size)


def tiled(blocks: int, neurons: int, seed: int = 0, tokens: int | None = None, path: Path = CARRIED) -> Activity:
    """A carried trace, or its first tokens, for so many blocks of neurons, those of a block by falling frequency."""
    carried = np.load(path)
    known, packed = carried["frequency"].astype(np.float64), carried["bits"][:tokens]
    generator = np.random.default_rng(seed)
    layers, count = known.shape
    frequency = np.empty((blocks, neurons))
    bits = np.empty((len(packed), blocks, -(-neurons // 8)), np.uint8)
    for block in range(blocks):
        layer = block * layers // blocks
        orders = [generator.permutation(count) for _ in range(-(-neurons // count))]
        taken = np.concatenate(orders)[:neurons]
        taken = taken[np.argsort(-known[layer][taken], kind="stable")]
        active = np.unpackbits(packed[:, layer], axis=1, count=count, bitorder="little")
        frequency[block] = known[layer][taken]
        bits[:, block] = np.packbits(active[:, taken], axis=1, bitorder="little")
    return Activity(frequency, torch.from_numpy(bits))


def with_more(activity: Activity, times: float, seed: int = 0) -> Activity:
    """So many times as many neurons in each block and token, those included that were active: as copies of gates would
    list them, those that were active for some other tokens first."""
    bits, neurons = activity.bits.numpy(), activity.frequency.shape[1]
    tokens, generator = len(bits), np.random.default_rng(seed)
    more = np.empty_like(bits)
    for token in range(tokens):
        taken = [(token + tokens * n // 5) % tokens for n in range(5)]
        active, *others = np.unpackbits(bits[taken], axis=2, count=neurons, bitorder="little").astype(bool)
        order = generator.random(active.shape) + np.any(others, axis=0) + 2 * active
        wanted = np.minimum(np.rint(times * active.sum(1)).astype(int), neurons)
        rank = np.argsort(np.argsort(-order, axis=1), axis=1)
        more[token] = np.packbits(rank < wanted[:, None], axis=1, bitorder="little")
    return Activity(activity.frequency, torch.from_numpy(more))


@click.command()
@click.argument("calibration", type=click.Path(path_type=Path))
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--session", default=0, show_default=True)
@click.option("-o", "output", default=CARRIED, show_default=True, type=click.Path(path_type=Path))
def main(calibration: Path, trace: Path, session: int, output: Path) -> None:
    """Write frequencies, and who was active in the decoded tokens of a session of a trace."""
    found = load(trace)
    prompt = found.sessions[session].prompt
    active = np.stack([found.active(session, layer)[prompt:] for layer in range(found.layers)], axis=1)
    frequency = neuron_counts(calibration_or_trace(calibration)).frequency.numpy()
    bits = np.packbits(active, axis=2, bitorder="little")
    np.savez_compressed(output, frequency=frequency.astype(np.float32), bits=bits)
    click.echo(f"{output}: {len(bits)} tokens, {active.mean():.3f} active, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
