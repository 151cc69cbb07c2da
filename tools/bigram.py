"""The baselines of the tiny model: unigram and bigram models of the same tokens, as tables of probabilities."""

import torch


def unigram_table(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Relative frequencies with one added to every count.

    `tokens`: int64 [n]. Returns float64 [vocabulary, vocabulary] like `bigram_table`, every row the same.
    """
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).expand(vocabulary, vocabulary)


def bigram_table(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """P(next | previous) by interpolated Kneser-Ney smoothing (Chen and Goodman 1999, section 2.7).

    `tokens`: int64 [n]. Returns float64 [vocabulary, vocabulary], row = previous token; each row sums to one and
    nothing in it is zero: what is discounted goes to how many contexts a token follows, and a part of that evenly
    to all tokens.
    """
    pairs = tokens[:-1] * vocabulary + tokens[1:]
    counts = torch.bincount(pairs, minlength=vocabulary**2).view(vocabulary, vocabulary).double()
    uniform = torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)
    contexts = (counts > 0).sum(0, keepdim=True).double()  # [1, vocabulary]: distinct tokens seen before each
    return _interpolate(counts, _interpolate(contexts, uniform))


def table_nll(table: torch.Tensor, tokens: torch.Tensor, bos: int) -> torch.Tensor:
    """Negative log-likelihood in nats of each token given the one before it, `bos` before the first: float64 [n]."""
    previous = torch.cat([tokens.new_tensor([bos]), tokens[:-1]])
    return -table[previous, tokens].log()


def _interpolate(counts: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Absolute discounting of each row of `counts`; the mass taken off is spread as `lower`; empty rows are `lower`."""
    once, twice = (counts == 1).sum().item(), (counts == 2).sum().item()
    discount = once / (once + 2 * twice) if once and twice else 0.5
    total = counts.sum(1, keepdim=True)
    freed = discount * (counts > 0).sum(1, keepdim=True)
    seen = (counts - discount).clamp(min=0) + freed * lower
    return torch.where(total > 0, seen / total.clamp(min=1), lower.expand_as(counts))
