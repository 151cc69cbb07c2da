"""`fisher` allocation: every channel of every site by how much leaving it out would move the model's output.

To second order KL(dense || sparse) is half the mean of (g . d)^2: d is what skipping takes from a site's input, g the
gradient with respect to that input of log p(y), y a token drawn from the model itself (the Fisher information). With
channels taken as independent, skipping channel j costs x_j^2 E[g_j^2] / 2 and saves reading as many weights as the site
has rows. So one threshold for all channels of all sites on the score |x_j| c_j, c_j = sqrt(E[g_j^2] / rows), loses
least for what it saves; it gives each site its share of the target. The experts of a block share their thresholds,
whose channels have nothing in common: there c is one number for the site.

One forward and one backward pass over some thousand tokens, block by block; no weight is trained.
Unpublished. `python -m benchmarks small_models` measures what it costs real models.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsepack.calibrate import histogram
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.training import Train
from sparsepack.errors import ThresholdsError
from sparsepack.files.tensors import arithmetic
from sparsepack.models.activations import soft_capped
from sparsepack.models.blocks import ExpertNumbers
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_MID
from sparsepack.models.hf_config import expert_numbers, multipliers
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.hooks import expert_hooks, routing_hooks, site_hooks
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import progress
from sparsepack.workers.exchange import Each

WINDOWS, TOKENS = 8, 512
"""So many windows are run, and so many tokens of each."""
_SINKS = 4
"""The first positions of a window are left out: their inputs are unlike all others."""
_HIGHEST = 0.98
_FLOOR = 1e-6
"""No channel counts less than this beside the mean of its site's squares, no site beside the one that counts most."""
_LOGITS = 1 << 22
"""No more logits than this are computed at a time: 16 MiB in float32, which a heap gives out again as they are."""


def find_rules(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    train: Train | None = None,
    each: Each | None = None,
) -> dict[SiteKey, SiteRule]:
    """Rules without their thresholds: channel weights c and the share that one threshold for all of them skips.

    weights -- each site's share of the parameters

    Raises `ThresholdsError` where gradients are not finite.
    """
    channels: dict[SiteKey, Tensor] = {}
    counts, scales = {}, {}
    ids = spread_windows(calibration.windows, WINDOWS)[:, :TOKENS]
    for (layer, site), seen in gradients(checkpoint, ids, options):
        if (layer, site) not in weights:
            continue
        squares = seen.at_input.square().flatten(0, -2).mean(0)
        if not torch.isfinite(squares).all():
            raise ThresholdsError(
                f"blk.{layer}.{site}: gradients are not finite; give --dtype float32, or another --allocation"
            )
        # Apart from their scale, for histograms hold no number however small; a site that seems to be of no use stays
        # comparable, and so does one of its channels.
        mean = float(squares.mean())
        if checkpoint.family.of_experts(layer, site) or mean == 0:
            squares = torch.full_like(squares, mean or 1.0)
        c = squares.clamp_min(_FLOOR * float(squares.mean())).sqrt()
        channels[layer, site] = c / c.log().mean().exp()
        rows = checkpoint.token_weights(site, layer) / len(squares)  # that a token reads
        scales[layer, site] = math.sqrt(mean / rows) * float(c.log().mean().exp()) / math.sqrt(float(c.square().mean()))
        counts[layer, site] = histogram.count(seen.x.abs() * channels[layer, site]).cpu()
    largest = max(scales.values(), default=0.0) or 1.0
    scales = {key: max(scale, math.sqrt(_FLOOR) * largest) for key, scale in scales.items()}
    shares = shares_at_sparsity(counts, scales, weights, options.sparsity)
    return {
        key: SiteRule(
            channel_weights=None if checkpoint.family.of_experts(*key) else channels[key].cpu(),
            sparsity=shares[key],
        )
        for key in weights
    }


def shares_at_sparsity(
    counts: Mapping[SiteKey, Tensor], scales: Mapping[SiteKey, float], weights: Mapping[SiteKey, float], sparsity: float
) -> dict[SiteKey, float]:
    """The share of each site that lies below the threshold below which so much of all weights lies.

    counts -- histograms of scores over `scales`
    """

    def shares(threshold: float) -> dict[SiteKey, float]:
        below = {key: histogram.share_at_most(counts[key], threshold / scales[key]) for key in weights}
        return {key: min(share, _HIGHEST) for key, share in below.items()}

    limits = histogram.edges()
    low = math.log(min(scales.values()) * float(limits[1]))
    high = math.log(max(scales.values()) * float(limits[-1]))
    for _ in range(50):
        middle = (low + high) / 2
        below = sum(weights[key] * share for key, share in shares(math.exp(middle)).items()) < sparsity
        low, high = (middle, high) if below else (low, middle)
    return shares(math.exp(high))


class Seen(NamedTuple):
    """Of a site, on the tokens of windows without their sinks.

    x        -- float32 [B, S, columns], of experts [B, S, experts of a token, columns] at mlp_mid
    at_input -- the gradient there, shaped as x
    of_rows  -- the mean square over tokens of the gradient at each row of the output: float32 [rows], of experts
                [stored experts, rows], zero for tokens that an expert does not have
    chosen   -- of experts at mlp_mid, which ones a token has: int64 [B, S, experts of a token]
    """

    x: Tensor
    at_input: Tensor
    of_rows: Tensor
    chosen: Tensor | None = None


def gradients(checkpoint: Checkpoint, ids: Tensor, options: AllocationOptions) -> Iterator[tuple[SiteKey, Seen]]:
    """Yield of every site, the last block first, its key, and the gradients of the log-likelihood of drawn tokens.

    ids -- int64 [B, S]
    """
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    stream, layers = open_blocks(checkpoint, options.device, dtype), checkpoint.layers
    hidden = [stream.embed(ids)]
    with progress("fisher information", 2 * layers, 0, 1) as advance:
        with torch.no_grad():
            for layer in range(layers):
                stream.load(layer)
                hidden.append(torch.cat([stream(row[None]).cpu() for row in hidden[-1]]))
                advance()
        gradient = _of_output(stream, hidden.pop())
        for layer in reversed(range(layers)):
            stream.load(layer, step=-1)
            entered = hidden.pop()
            seen: dict[str, list[Seen]] = {site: [] for site in checkpoint.family.projections_of(layer)}
            for number, row in enumerate(entered):
                gradient[number] = _through_block(stream, layer, row[None], gradient[number : number + 1], seen)
            for site, parts in seen.items():
                if parts:
                    x, at_input, of_rows, chosen = zip(*parts, strict=True)
                    of_each = None if chosen[0] is None else torch.cat(chosen)
                    yield (layer, site), Seen(torch.cat(x), torch.cat(at_input), torch.stack(of_rows).mean(0), of_each)
            advance()


def _through_block(
    stream: BlockStream, layer: int, hidden: Tensor, gradient: Tensor, seen: dict[str, list[Seen]]
) -> Tensor:
    """The gradient [1, S, H] in front of the loaded block, of that behind it; `seen` has more of each site then."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, list[Tensor]] = {}
    of_experts: list[tuple[str, int, Tensor, Tensor]] = []
    routed: list[Tensor] = []

    def function(_: int, site: str, x: Tensor) -> Tensor:
        inputs[site] = x.view_as(x)
        return inputs[site]

    def keep(site: str, _: nn.Module, __: object, output: Tensor) -> Tensor:
        outputs.setdefault(site, []).append(output.view_as(output))
        return outputs[site][-1]

    def keep_expert(site: str, expert: int, token: Tensor, _: Tensor, y: Tensor) -> Tensor:
        of_experts.append((site, expert, token, y.view_as(y)))
        return of_experts[-1][-1]

    family, block = stream.source.family, stream.block
    handles = [
        block.get_submodule(name).register_forward_hook(partial(keep, site))
        for site, names in family.of_block(block).projections_of(layer).items()
        if not family.of_experts(layer, site)
        for name in names
    ]
    entered = hidden.to(stream.device, stream.dtype).requires_grad_()
    try:
        with (
            torch.enable_grad(),
            site_hooks([(layer, block)], family, function),
            expert_hooks(block, family, keep_expert, layer),
            routing_hooks(block, family, routed.append, layer),
        ):
            left = stream(entered)
            sources = [entered, *inputs.values(), *(output for each in outputs.values() for output in each)]
            sources += [y for *_, y in of_experts]
            reached = [source for source in sources if source.requires_grad]  # what only chooses tokens is not
            slopes = iter(torch.autograd.grad(left, reached, gradient.to(left), allow_unused=True))
            each_slope = [next(slopes) if source.requires_grad else None for source in sources]
            found = [
                torch.zeros_like(source) if slope is None else slope
                for source, slope in zip(sources, each_slope, strict=True)
            ]
    finally:
        for handle in handles:
            handle.remove()
    at_outputs = iter(found[1 + len(inputs) :])
    of_rows = {
        site: torch.cat([_mean_squares(next(at_outputs), entered.shape[1]) for _ in each])
        for site, each in outputs.items()
    }
    chosen: Tensor | None = None
    if of_experts:
        numbers = expert_numbers(stream.source.config, layer)
        assert numbers is not None
        of_rows |= _of_expert_rows([(*each[:3], next(at_outputs)) for each in of_experts], numbers, entered.shape[1])
        shared = torch.arange(numbers.count, numbers.stored, device=entered.device)
        chosen = torch.cat([routed[0], shared.expand(*routed[0].shape[:2], -1)], -1)[:, _SINKS:]
    for (site, x), slope in zip(inputs.items(), found[1:], strict=False):
        of_each = chosen if site == MLP_MID else None
        seen[site].append(Seen(x.detach()[:, _SINKS:].float(), slope[:, _SINKS:].float(), of_rows[site], of_each))
    return found[0].cpu()


def _of_expert_rows(
    gradients: Sequence[tuple[str, int, Tensor, Tensor]], numbers: ExpertNumbers, positions: int
) -> dict[str, Tensor]:
    """`Seen.of_rows` of the sites of experts, from the gradients of their products (`hooks.ExpertProduct`)."""
    found: dict[str, Tensor] = {}
    for site, expert, token, gradient in gradients:
        squares = gradient[token >= _SINKS].float().square().sum(0) / (positions - _SINKS)
        if expert < numbers.count:
            of_each = squares[None]
        elif site == MLP_MID:  # each part of a shared expert adds to all of its rows
            of_each = squares.expand(numbers.shared, -1)
        else:
            of_each = squares.view(2, numbers.shared, -1).transpose(0, 1).flatten(1)
        if site not in found:
            found[site] = squares.new_zeros(numbers.stored, of_each.shape[1])
        found[site][expert : expert + len(of_each)] = of_each
    return found


def _mean_squares(gradient: Tensor, positions: int) -> Tensor:
    """Of a gradient [1, S, rows], or with rows of positions joined, without the sinks: float32 [rows]."""
    return gradient.view(positions, -1)[_SINKS:].float().square().mean(0)


def _of_output(stream: BlockStream, hidden: Tensor) -> Tensor:
    """The gradient of the log-likelihood of drawn tokens with respect to what leaves the last block: [B, S, H]."""
    generator = torch.Generator().manual_seed(0)
    head, cap = stream.head().to(stream.device, stream.dtype), multipliers(stream.source.config).logit_cap
    step = max(1, _LOGITS // len(head))
    slopes = []
    for row in hidden:
        parts = []
        for part in row.split(step):
            entered = part[None].to(stream.device, stream.dtype).requires_grad_()
            with torch.enable_grad():
                logits = soft_capped(nn.functional.linear(stream.finish(entered), head), cap)[0]
            p = logits.detach().float().softmax(-1)
            drawn = torch.multinomial(p.cpu(), 1, generator=generator).to(p.device)
            of_logits = p.neg_().scatter_add_(1, drawn, torch.ones(len(part), 1, device=p.device))
            (slope,) = torch.autograd.grad(logits, entered, of_logits.to(logits.dtype))
            parts.append(slope[0].cpu())
        slopes.append(torch.cat(parts))
    return torch.stack(slopes)
