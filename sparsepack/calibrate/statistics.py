"""What a calibration knows: of the channels of attention heads, of reading few tokens, of experts and neurons, and what
a basis is found from.

The importance of each channel of an attention head is that by which Double Sparsity chooses its heavy channels (4.1).
Heads that learned different things have different heavy channels. Where those of all heads are nearly the same, the
statistics were mixed up on the way, which is easily done: heads and positions are neighbouring dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibrate.collectors import SHARES, Statistics, of_groups
from sparsepack.calibrate.folder import OUTPUT_PRODUCT, PRODUCT, Calibration, attention_blocks
from sparsepack.errors import CalibrationError


@dataclass(frozen=True)
class Importance:
    """The importance of every channel of every KV head of a layer: float64 [kv_heads, D] each, of any scale.

    q and k are those after q/k norms and rotary embedding, their channels in the model's own order. The first positions
    of a window (attention sinks) are left out, as queries and as keys: Double Sparsity always reads the sinks' keys.

    query   -- sum over positions of |q_c|, the mean over the query heads that share the KV head
    key     -- sum over positions of |k_c|
    product -- sum over pairs of a query and a key that it sees of |q_c k_c|, the mean over these query heads
    """

    query: torch.Tensor
    key: torch.Tensor
    product: torch.Tensor


def importance(calibration: Calibration) -> tuple[Importance, ...]:
    """The importance of channels in every layer with attention (`folder.attention_blocks`)."""
    return tuple(_importance(calibration.layers[layer]) for layer in attention_blocks(calibration.manifest))


def _importance(statistics: Statistics) -> Importance:
    query, key, product = (statistics[f"attention.{name}_abs"] for name in ("query", "key", "product"))
    return Importance(of_groups(query, len(key)), key, product)


COUNTS = (8, 16, 32)
"""The report says which share of a head's importance this many of its channels have."""

COMPARED = 16
"""Two heads are compared by this many of their heaviest channels."""

ALIKE = 0.9
"""Heads that have more than this share of their heaviest channels in common are reported: in the mixed-up lists that
were published with the paper's code it is 0.91 to 0.99; in books-26m-silu, by these statistics, 0.2 to 0.5."""


def channel_report(layers: Sequence[Importance]) -> dict[str, Any]:
    """Every layer's channels in a few numbers, JSON-able. Shares and overlaps are between 0 and 1.

    counts   -- COUNTS, and compared -- COMPARED, as far as head_dim has more than that; otherwise a quarter of head_dim
    chance   -- the overlap of two heads that have nothing to do with each other
    layers   -- share: of the importance by q*k, in so many channels of a head, for each of `counts`; mean of the heads
                heads_agree: by q, k and q*k, the overlap of the heaviest channels of two heads, mean of all pairs of KV
                heads; None where there is one
                key_agrees: the overlap of a head's heaviest channels by k and by q*k, mean of the heads
    alike    -- the layers whose heads agree beyond ALIKE by any of the three
    """
    head_dim = layers[0].key.shape[1]
    quarter = max(1, head_dim // 4)
    counts = [count for count in COUNTS if count < head_dim] or [quarter]
    compared = COMPARED if head_dim > COMPARED else quarter
    rows = [_row(layer, counts, compared) for layer in layers]
    return {
        "head_dim": head_dim,
        "counts": counts,
        "compared": compared,
        "chance": compared / head_dim,
        "layers": rows,
        "alike": [
            n for n, row in enumerate(rows) if any((found or 0) > ALIKE for found in row["heads_agree"].values())
        ],
    }


def _row(layer: Importance, counts: Sequence[int], compared: int) -> dict[str, Any]:
    heavy = {name: _heaviest(value, compared) for name, value in vars(layer).items()}
    largest = layer.product.sort(1, descending=True).values.cumsum(1)
    shares = (largest / largest[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)).mean(0)
    return {
        "share": [float(shares[count - 1]) for count in counts],
        "heads_agree": {name: _agreement(combinations(sets, 2), compared) for name, sets in heavy.items()},
        "key_agrees": _agreement(zip(heavy["key"], heavy["product"], strict=True), compared),
    }


def _heaviest(value: torch.Tensor, count: int) -> list[set[int]]:
    """The heaviest channels of each head."""
    return [set(channels) for channels in value.topk(count, 1).indices.tolist()]


def _agreement(pairs: Any, compared: int) -> float | None:
    """The share of channels that two sets of so many have in common, mean over the pairs."""
    shares = [len(one & other) / compared for one, other in pairs]
    return sum(shares) / len(shares) if shares else None


MEASURED = tuple(Fraction(1, share) for share in SHARES)
"""`missed` has a figure for each of these shares of the tokens."""


def missed(calibration: Calibration) -> tuple[tuple[float, ...], ...]:
    """For every layer and each share in `MEASURED`: the share of attention weight that the other tokens have, where the
    best ones are read (`collectors.missed`). Raises `CalibrationError` for sums that are no means of shares."""
    return tuple(_missed(calibration, layer) for layer in attention_blocks(calibration.manifest))


def token_report(calibration: Calibration) -> dict[str, Any]:
    """What `missed` gives, JSON-able: `shares` as text, and of each of `layers` what is `missed`. Raises as `missed`
    does."""
    layers = [{"missed": list(lost)} for lost in missed(calibration)]
    return {"shares": [str(share) for share in MEASURED], "layers": layers}


def _missed(calibration: Calibration, layer: int) -> tuple[float, ...]:
    sums, positions = (calibration.layers[layer][f"attention.{name}"] for name in ("missed", "missed_positions"))
    if not bool((positions > 0).all()) or not bool((sums.abs() <= positions * (1 + 1e-6)).all()):
        raise CalibrationError(
            f"the calibration of {calibration.manifest['model']['name']}: attention.missed of block {layer} is no mean "
            "of shares; calibrate again"
        )
    return tuple((sums / positions).tolist())


FEW = 32
"""An expert that was given fewer tokens than this is named: what is known of its inputs is of other experts."""


def has_experts(calibration: Calibration) -> bool:
    """Whether it is of a model whose MLPs have experts, of some blocks at least."""
    return any(_GIVEN in layer for layer in calibration.layers)


_GIVEN = "experts.given"


def with_experts(calibration: Calibration) -> list[int]:
    """The blocks whose MLPs have experts."""
    return [number for number, layer in enumerate(calibration.layers) if _GIVEN in layer]


def given(calibration: Calibration) -> torch.Tensor:
    """How many tokens each expert was given, of each block that has experts (`with_experts`): int64 [blocks, experts].
    Raises `CalibrationError` for counts that contradict each other."""
    rows: list[torch.Tensor] = []
    model = calibration.manifest["model"]["name"]
    for layer in with_experts(calibration):
        statistics = calibration.layers[layer]
        each, tokens = statistics[_GIVEN], statistics["experts.routed_tokens"]
        fits = len(tokens) == 1 and int(tokens) > 0 and bool(((each >= 0) & (each <= tokens)).all())
        if not fits or int(each.sum()) % int(tokens) or (rows and len(rows[0]) != len(each)):
            raise CalibrationError(
                f"the calibration of {model}: experts.given of block {layer} is no count of the tokens; calibrate again"
            )
        rows.append(each)
    return torch.stack(rows)


def told_of_starved(calibration: Calibration) -> str | None:
    """A sentence for people about experts that were given fewer than `FEW` tokens; None where there are none.

    Nothing is refused for it: thresholds are those of a block, pooled over its experts.
    """
    if not has_experts(calibration):
        return None
    counts = given(calibration)
    few = (counts < FEW).nonzero().tolist()
    if not few:
        return None
    none = int((counts == 0).sum())
    row, expert = min(few, key=lambda at: int(counts[at[0], at[1]]))
    block = with_experts(calibration)[row]
    return (
        f"{len(few)} of {counts.numel()} experts were given fewer than {FEW} tokens, {none} of them none (the fewest: "
        f"expert {expert} of block {block}, {int(counts[row, expert])}); thresholds are pooled over a block's "
        "experts and stay those of the others: calibrate on more text, or on text of other kinds, to reach them"
    )


@dataclass(frozen=True)
class Activity:
    """How often the neurons of one decoder block are active, or its experts, who are where a token is given to them.

    active  -- int64 [neurons], tokens for which each neuron was active
    tokens  -- how many were counted
    squares -- the sum over tokens of the square of how many neurons were active
    """

    active: torch.Tensor
    tokens: int
    squares: int

    @property
    def frequency(self) -> torch.Tensor:
        """The share of tokens for which each neuron is active: float64 [neurons]."""
        return self.active.double() / self.tokens

    @property
    def density(self) -> float:
        """The share of the neurons that a token has active, mean over tokens."""
        return float(self.frequency.mean())

    @property
    def spread(self) -> float:
        """The standard deviation over tokens of the share of the neurons that are active."""
        neurons = len(self.active)
        variance = self.squares / self.tokens - (self.density * neurons) ** 2
        return float(max(variance, 0.0) ** 0.5 / neurons)


def activity(calibration: Calibration) -> tuple[Activity, ...]:
    """The activity of the neurons, or of the experts, of every layer. Raises `CalibrationError` for counts that
    contradict each other."""
    return tuple(_activity(calibration, layer) for layer in range(len(calibration.layers)))


def _activity(calibration: Calibration, layer: int) -> Activity:
    statistics: Mapping[str, torch.Tensor] = calibration.layers[layer]
    model = calibration.manifest["model"]["name"]
    if _GIVEN in statistics:
        each = given(calibration)[with_experts(calibration).index(layer)]
        count = int(statistics["experts.routed_tokens"])
        return Activity(each, count, count * (int(each.sum()) // count) ** 2)
    active, tokens, squares = (statistics[f"neurons.{name}"] for name in ("active", "tokens", "squares"))
    fits = len(tokens) == len(squares) == 1 and int(tokens) > 0 and bool(((active >= 0) & (active <= tokens)).all())
    total = int(active.sum())
    # By Cauchy and Schwarz; whole numbers of Python, which do not overflow.
    if not fits or not total**2 <= int(squares) * int(tokens) <= total * len(active) * int(tokens):
        raise CalibrationError(
            f"the calibration of {model}: neurons.active of block {layer} is no count of the tokens; calibrate again"
        )
    return Activity(active, int(tokens), int(squares))


def second_moments(calibration: Calibration) -> list[tuple[range, Tensor]] | None:
    """The second moments E[x x^T] of the residual stream before the norms' weights, x = h / rms(h), for each run of
    blocks: float64 [hidden, hidden]. None where the calibration has none."""
    section = calibration.manifest.get("residual")
    if section is None:
        return None
    found, first = [], 0
    counted = calibration.manifest["tokens"]["counted"] * section["norms"]
    for layer, statistics in enumerate(calibration.layers):
        if PRODUCT in statistics:
            blocks = range(first, layer + 1)
            found.append((blocks, statistics[PRODUCT] / (counted * len(blocks))))
            first = layer + 1
    return found


def output_moments(calibration: Calibration) -> tuple[Tensor, ...] | None:
    """The second moments E[y y^T] of what the query heads of each KV head give, of each block: float64
    [kv_heads, D, D]. None where the calibration has none."""
    heads = calibration.manifest["attention"]
    counted = calibration.manifest["tokens"]["counted"] * (heads["heads"] // heads["kv_heads"])
    found = [layer[OUTPUT_PRODUCT] / counted for layer in calibration.layers if OUTPUT_PRODUCT in layer]
    return tuple(found) or None
