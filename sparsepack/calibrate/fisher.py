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
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from sparsepack.calibrate import histogram
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.training import Train
from sparsepack.errors import ThresholdsError
from sparsepack.files.tensors import arithmetic
from sparsepack.models.architecture import soft_capped
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_SITES, SITES
from sparsepack.models.hf_config import multipliers
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import site_hooks
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
_LOGITS = 1 << 25
"""No more logits than this are computed at a time: 128 MiB in float32."""


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
    for (layer, site), x, gradient, _ in gradients(checkpoint, ids, options):
        if (layer, site) not in weights:
            continue
        squares = gradient.square().flatten(0, -2).mean(0)
        if not torch.isfinite(squares).all():
            raise ThresholdsError(
                f"blk.{layer}.{site}: gradients are not finite; give --dtype float32, or another --allocation"
            )
        # Apart from their scale, for histograms hold no number however small; a site that seems to be of no use stays
        # comparable, and so does one of its channels.
        mean = float(squares.mean())
        if _pooled(checkpoint, site) or mean == 0:
            squares = torch.full_like(squares, mean or 1.0)
        c = squares.clamp_min(_FLOOR * float(squares.mean())).sqrt()
        channels[layer, site] = c / c.log().mean().exp()
        rows = checkpoint.token_weights(site, layer) / len(squares)  # that a token reads
        scales[layer, site] = math.sqrt(mean / rows) * float(c.log().mean().exp()) / math.sqrt(float(c.square().mean()))
        counts[layer, site] = histogram.count(x.abs() * channels[layer, site]).cpu()
    largest = max(scales.values(), default=0.0) or 1.0
    scales = {key: max(scale, math.sqrt(_FLOOR) * largest) for key, scale in scales.items()}
    shares = shares_at_sparsity(counts, scales, weights, options.sparsity)
    return {
        key: SiteRule(
            channel_weights=None if _pooled(checkpoint, key[1]) else channels[key].cpu(), sparsity=shares[key]
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


def _pooled(checkpoint: Checkpoint, site: str) -> bool:
    return checkpoint.family.experts is not None and site in MLP_SITES


Seen = tuple[Tensor, Tensor, Tensor]
"""Of a site: x; the gradient at x; the mean squares of the gradient at each row of the output, of experts no rows."""


def gradients(
    checkpoint: Checkpoint, ids: Tensor, options: AllocationOptions
) -> Iterator[tuple[SiteKey, Tensor, Tensor, Tensor]]:
    """Yield of every site, the last block first, its key, x, and the gradients of the log-likelihood of drawn tokens:
    at x, float32 [B, S, columns] as x is, without the sinks, of experts [B, S, experts, columns] where x is; and at the
    output, the mean squares float32 [rows], of experts no rows."""
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    stream, layers = BlockStream(checkpoint, options.device, dtype), checkpoint.layers
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
            seen: dict[str, list[Seen]] = {site: [] for site in SITES}
            for number, row in enumerate(entered):
                gradient[number] = _through_block(stream, layer, row[None], gradient[number : number + 1], seen)
            for site, parts in seen.items():
                if parts:
                    x, slope = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
                    yield (layer, site), x, slope, torch.stack([part[2] for part in parts]).mean(0)
            advance()


def _through_block(
    stream: BlockStream, layer: int, hidden: Tensor, gradient: Tensor, seen: dict[str, list[Seen]]
) -> Tensor:
    """The gradient [1, S, H] in front of the loaded block, of that behind it; `seen` has more of each site then."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, list[Tensor]] = {}

    def function(_: int, site: str, x: Tensor) -> Tensor:
        inputs[site] = x.view_as(x)
        return inputs[site]

    def keep(site: str, _: nn.Module, __: object, output: Tensor) -> Tensor:
        outputs.setdefault(site, []).append(output.view_as(output))
        return outputs[site][-1]

    family, block = stream.source.family, stream.block
    linears = {} if family.experts is not None else family.projections
    handles = [
        block.get_submodule(name).register_forward_hook(partial(keep, site))
        for site, names in linears.items()
        for name in names
    ]
    entered = hidden.to(stream.device, stream.dtype).requires_grad_()
    try:
        with torch.enable_grad(), site_hooks([(layer, block)], family, function):
            left = stream(entered)
            sources = [entered, *inputs.values(), *(output for each in outputs.values() for output in each)]
            found = torch.autograd.grad(left, sources, gradient.to(left), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    at_outputs = iter(found[1 + len(inputs) :])
    of_rows = {
        site: torch.cat([_mean_squares(next(at_outputs), entered.shape[1]) for _ in each])
        for site, each in outputs.items()
    }
    for (site, x), slope in zip(inputs.items(), found[1:], strict=False):
        if slope is not None:
            rows = of_rows.get(site, slope.new_zeros(0))
            seen[site].append((x.detach()[:, _SINKS:].float(), slope[:, _SINKS:].float(), rows))
    return found[0].cpu()


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
                logits = soft_capped(nn.functional.linear(stream.finish(entered), head), cap)
                log_p = logits.float().log_softmax(-1)[0]
                drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
                (slope,) = torch.autograd.grad(log_p.gather(1, drawn).sum(), entered)
            parts.append(slope[0].cpu())
        slopes.append(torch.cat(parts))
    return torch.stack(slopes)
