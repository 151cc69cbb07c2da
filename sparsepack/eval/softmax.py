"""The softmax of logits that come a part of the vocabulary at a time, so that all of them never exist together."""

import torch


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float64: the divergence of two sure models is a small difference of large sums. Metal knows no float64."""
    return values if values.device.type == "mps" else values.double()


class RunningSoftmax:
    """The sums of N positions over the words seen so far, all on the CPU:

    largest -- float64 [N], the largest logit;  top -- int64 [N], its word, the first of equal ones
    total   -- float64 [N], the sum of exp(logit - largest)
    """

    def __init__(self, wanted: torch.Tensor) -> None:
        self._wanted = wanted.cpu()  # int64 [N], the words whose likelihood is asked for
        self._picked = torch.full((len(wanted),), torch.nan, dtype=torch.float64)
        self.largest = torch.full((len(wanted),), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros(len(wanted), dtype=torch.float64)
        self.top = torch.zeros(len(wanted), dtype=torch.int64)

    def take(self, part: slice, first: int, logits: torch.Tensor) -> torch.Tensor:
        """Add the words from `first` on, float32 [P, words], at the positions `part`.

        Returns exp(logits - largest), the largest of all words seen so far: float32 [P, words].
        """
        values, words = (found.cpu() for found in logits.max(-1))
        before, values = self.largest[part], values.double()
        largest = torch.maximum(before, values)
        grown = torch.exp(logits - largest.to(logits)[:, None])
        self.total[part] = self.total[part] * torch.exp(before - largest) + wide(grown).sum(-1).cpu()
        self.top[part] = torch.where(values > before, words + first, self.top[part])
        self.largest[part] = largest
        place = self._wanted[part] - first
        here = (place >= 0) & (place < logits.shape[-1])
        place = place.clamp(0, logits.shape[-1] - 1).to(logits.device)
        picked = logits.gather(-1, place[:, None])[:, 0].cpu().double()
        self._picked[part] = torch.where(here, picked, self._picked[part])
        return grown

    def log_sum(self) -> torch.Tensor:
        """log of the sum of exp(logit) over the vocabulary: float64 [N]."""
        return self.largest + self.total.log()

    def nll(self) -> torch.Tensor:
        """Negative log-likelihood of the words asked for, in nats: float64 [N]."""
        return self.log_sum() - self._picked
