"""Both sides of the decoding benchmark against the stock model with their own dequantised weights, before timing.

Dense logits must agree. Sparse ones cannot to the last bits: an input so close to its threshold that rounding decides
is worth more than all rounding, and in a random model it moves others across theirs. How far that carries is measured
on the stock model itself, with every site's input changed by 0.01 %: five and nine hundredths of the logits, the same
for noise three times smaller or ten times larger. Ours may be half as much again off, and as active as the stock model.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from llama_cpp_peer import LlamaCpp, check
from nearness import relative_error
from synthetic import Synthetic, random_ids

from sparsepack.eval.subject import Subject, open_subject
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

TOKENS = 32
PROMPT = 16
DENSE_LIMIT = 2e-3
NOISE = 1e-4
NOISE_FACTOR = 1.5
ACTIVITY_LIMIT = 0.02  # of a site's share of active columns, over the 16 positions
_SMALLEST_LIMIT = 0.05  # in a small model the noise may move no input across its threshold, and our rounding one


@dataclass(frozen=True)
class _Expected:
    """logits after the prompt and after each later token: float32 [17, vocabulary]; active share by (layer, site)."""

    logits: torch.Tensor
    activity: Mapping[tuple[int, str], float]
    limit: float


class Checks:
    """What the stock models say to one short text, and whether others say the same. RuntimeError where they do not."""

    def __init__(self, model: Synthetic, vocabulary: int) -> None:
        self.ids = random_ids(vocabulary, TOKENS, seed=2)
        plain = open_subject(str(model.plain))
        self._peer, _ = self._stock(plain, {})
        del plain
        gc.collect()
        zigzag = open_subject(str(model.zigzag))
        self._ours = {"dense": _Expected(*self._stock(zigzag, {}), DENSE_LIMIT)}
        for sparsity, table in model.thresholds.items():
            logits, activity = self._stock(zigzag, table)
            disturbed, _ = self._stock(zigzag, table, NOISE)
            limit = max(_SMALLEST_LIMIT, NOISE_FACTOR * _median_error(disturbed, logits))
            self._ours[str(sparsity)] = _Expected(logits, activity, limit)

    @torch.inference_mode()
    def _stock(
        self, subject: Subject, thresholds: Mapping[tuple[int, str], float], noise: float = 0.0
    ) -> tuple[torch.Tensor, dict[tuple[int, str], float]]:
        """Logits and activity of the stock model with the tokens after the prompt sparse."""
        activity: dict[tuple[int, str], float] = {}
        generator = torch.Generator().manual_seed(0)

        def sparsify(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            if (layer, site) not in thresholds:
                return None
            if noise:
                x = x * (1 + noise * torch.randn(x.shape, generator=generator))
            active = x.abs() > thresholds[layer, site]
            activity[layer, site] = active[:, PROMPT:].float().mean().item()
            prompt = torch.arange(x.shape[1])[:, None] < PROMPT
            return torch.where(active | prompt, x, 0)

        with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, sparsify):
            logits: torch.Tensor = subject.model(torch.tensor([self.ids]), use_cache=False).logits[0, PROMPT - 1 :]
        return logits.clone(), activity

    def peer(self, peer: LlamaCpp) -> float:
        """llama.cpp's relative error."""
        return check(peer, self.ids[:PROMPT], self.ids[PROMPT:], self._peer)

    def engine(self, engine: Engine, name: str) -> float:
        """Our relative error, `name` being "dense" or the sparsity; of a sparse engine the median over positions."""
        expected = self._ours[name]
        engine.dense = name == "dense"
        engine.reset()
        found = torch.stack([(engine.step(p[0]) if n else engine.prefill(p)) for n, p in enumerate(self._pieces())])
        error = (relative_error if name == "dense" else _median_error)(found, expected.logits)
        message = f"logits differ from the stock model's by {error:.3g}, expected at most {expected.limit:.3g}"
        _expect(name, error <= expected.limit, message)
        for site, share in engine.activity().items():
            wanted = expected.activity.get(site, 1.0)
            _expect(name, abs(share - wanted) <= ACTIVITY_LIMIT, f"{site} is {share:.3f} active, expected {wanted:.3f}")
        self._expect_same_choices(engine, name, found)
        return error

    def _expect_same_choices(self, engine: Engine, name: str, logits: torch.Tensor) -> None:
        """What is timed is `decode_next`."""
        sampler = Sampler(Sampling(temperature=0.0))
        engine.reset()
        engine.prefill(self.ids[:PROMPT])
        chosen = [engine.decode_next(id, sampler) for id in self.ids[PROMPT:]]
        _expect(name, chosen == logits[1:].argmax(-1).tolist(), "does not choose the likeliest token")

    def _pieces(self) -> list[list[int]]:
        return [self.ids[:PROMPT], *([id] for id in self.ids[PROMPT:])]


def _median_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _expect(name: str, met: bool, otherwise: str) -> None:
    if not met:
        raise RuntimeError(f"{name}: {otherwise}; nothing is timed")
