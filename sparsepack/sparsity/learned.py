"""`global` allocation: thresholds of all blocks and sites at once, judged by the model's own output.

Every channel's threshold is a parameter. They are trained together against the KL divergence between the dense and
the sparse model's next-token distributions on calibration text, at a fixed overall sparsity, with Adam. The mask is
hard in the forward pass; in the backward pass a threshold feels a sigmoid of |x| / t (a straight-through estimate).
The answer is, per site, a sparsity and channel weights c_j = 1 / t_j, and optionally offsets: what an inactive channel
stands at instead of zero, which at run time is one vector folded into a bias.

Unpublished. benchmarks/RESULTS.md has it beside the block-wise allocations, benchmarks/notes/accuracy.md how its
settings were chosen.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from sparsepack.calibration.collectors import histogram
from sparsepack.calibration.criteria import channel_weights
from sparsepack.calibration.folder import Calibration
from sparsepack.files.resume import ResumeState
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.rule import SiteKey, SiteRule
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.whole import backbone_of, load_model
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import Shorter, progress
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.sparsity.sequential import Chooser
from sparsepack.sparsity.thresholds import rules_of_json, rules_to_json

_LEARNING_RATE = 0.03
_SOFTNESS = 0.15  # width of the sigmoid, as a share of the threshold
_STIFFNESS, _DUAL_RATE = 10.0, 0.3  # augmented Lagrangian that holds the sparsity
_HIGHEST = 0.98
_SAVE_EVERY = 20.0  # seconds


@dataclass
class _Parameters:
    """log_thresholds and offsets: float32 [columns] per site; scales: each site's first threshold."""

    log_thresholds: dict[SiteKey, torch.Tensor]
    offsets: dict[SiteKey, torch.Tensor]
    scales: dict[SiteKey, float]


def chooser(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    resume: ResumeState,
) -> Chooser:
    """The learnt rules of the sites in `weights`; the other sites stay dense."""
    learnt = learn_rules(checkpoint, calibration, options, weights, resume)
    return lambda layer, _: {site: learnt.get((layer, site), SiteRule()) for site in SITES}


def learn_rules(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    resume: ResumeState,
) -> dict[SiteKey, SiteRule]:
    """Target sparsity, channel weights and offsets of the sites in `weights`. Holds the whole model on one device."""
    if "learnt" in resume.parts:
        return rules_of_json(resume.parts["learnt"]["rules"], str(resume.path))
    dtype = arithmetic(options.dtype, checkpoint.dtype, options.device)
    model = load_model(checkpoint, options.device, dtype)
    parameters = _start(checkpoint, calibration, options, model, weights)
    training = _Training(parameters, options, resume)
    shorter = Shorter("--steps", options.steps)
    with progress("learning thresholds", options.steps, training.step, 1, shorter) as advance:
        while training.step < options.steps:
            ids = _slices(calibration.windows, options, training.generator).to(options.device)
            training.descend(*_divergence(model, checkpoint, ids, parameters, weights))
            advance()
    realised = _realised(model, checkpoint, calibration.windows, options, parameters, weights)
    rules = _learnt(parameters, options, _shifted(realised, weights, options.sparsity))
    resume.drop(_kept_at(training.step))
    resume.commit("learnt", rules=rules_to_json(rules))
    return rules


class _Training:
    """The optimiser of the parameters, the price of sparsity and the random numbers, as far as step `step`.

    All of it, and the parameters, are saved now and then: going on from there is the same, bit for bit, as never
    having stopped.
    """

    def __init__(self, parameters: _Parameters, options: AllocationOptions, resume: ResumeState) -> None:
        self.options, self.resume = options, resume
        self.step = 0
        self.price: float | None = None
        self.generator = torch.Generator().manual_seed(options.seed)
        groups: list[dict[str, Any]] = [{"params": [*parameters.log_thresholds.values()], "lr": _LEARNING_RATE}]
        if options.offsets:
            groups += [
                {"params": [offset], "lr": 0.3 * _LEARNING_RATE * parameters.scales[key]}
                for key, offset in parameters.offsets.items()
            ]
        self.optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min(1.0, 2 * (1 - step / options.steps))
        )
        if "learning" in resume.parts:
            self._resume()
        self.saved = time.monotonic()

    def descend(self, divergence: torch.Tensor, sparsity: torch.Tensor) -> None:
        """One step down the divergence, at the price of sparsity, which follows the gap to the target."""
        # dKL/ds at half sparsity is about four times the divergence itself.
        price = 4 * float(divergence.detach()) if self.price is None else self.price
        gap = self.options.sparsity - sparsity
        loss = divergence + price * gap + _STIFFNESS / 2 * gap * gap
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.schedule.step()
        self.price = price + _DUAL_RATE * float(gap.detach())
        self.step += 1
        if self.step == self.options.steps or time.monotonic() - self.saved >= _SAVE_EVERY:
            self._save()

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    def _save(self) -> None:
        adam = self.optimiser.state_dict()
        tensors = {f"parameter.{n}": parameter.detach() for n, parameter in enumerate(self._trained())}
        tensors |= {f"adam.{n}.{name}": x for n, moments in adam["state"].items() for name, x in moments.items()}
        if "learning" in self.resume.parts:
            self.resume.drop(_kept_at(self.resume.parts["learning"]["step"]))
        self.resume.keep("learning", _kept_at(self.step), {**tensors, "generator": self.generator.get_state()})
        values = {"step": self.step, "price": self.price, "groups": adam["param_groups"]}
        self.resume.commit("learning", **values, schedule=self.schedule.state_dict())
        self.saved = time.monotonic()

    @torch.no_grad()
    def _resume(self) -> None:
        kept = self.resume.parts["learning"]
        self.step, self.price = kept["step"], kept["price"]
        if type(self.step) is not int or not 0 < self.step <= self.options.steps:
            raise ValueError(f"step {str(self.step)[:60]} of {self.options.steps}")
        tensors = self.resume.load(_kept_at(self.step))
        self.generator.set_state(tensors.pop("generator"))
        for n, parameter in enumerate(self._trained()):
            parameter.copy_(tensors.pop(f"parameter.{n}"))
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            _, place, name = key.split(".")
            moments.setdefault(int(place), {})[name] = value
        self.optimiser.load_state_dict({"state": moments, "param_groups": kept["groups"]})
        self.schedule.load_state_dict(kept["schedule"])


def _kept_at(step: int) -> str:
    return f"learning-{step}"


def _start(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: AllocationOptions,
    model: Any,
    weights: Mapping[SiteKey, float],
) -> _Parameters:
    """Uniform thresholds of the criterion, from the calibration's dense histograms."""
    made = _Parameters({}, {}, {})
    for layer, site in weights:
        counts = calibration.layers[layer][f"{site}.histogram.{options.criterion}"].clone()
        threshold = histogram.quantile(counts, options.sparsity)
        if threshold == 0:  # more exact zeros than asked for: begin among the smallest of the others
            counts[0] = 0
            threshold = histogram.quantile(counts, 0.05) or 1.0  # nothing but zeros: any threshold will do
        columns = checkpoint.stacked_shape(site, layer)[1]
        names = checkpoint.family.projections[site]
        c = channel_weights(options.criterion, backbone_of(model).layers[layer], names)
        each = torch.full((columns,), threshold, device=options.device)
        each = each if c is None else each / c.clamp_min(float(c.max()) * 1e-6 or 1.0)
        key = (layer, site)
        made.scales[key] = float(each.median())
        made.log_thresholds[key] = each.log().requires_grad_(True)
        made.offsets[key] = torch.zeros(columns, device=options.device, requires_grad=options.offsets)
    return made


def _slices(windows: torch.Tensor, options: AllocationOptions, generator: torch.Generator) -> torch.Tensor:
    """Random stretches of the calibration windows [batch, length], each beginning with its window's first token."""
    length = min(options.length, windows.shape[1])
    chosen = torch.randint(len(windows), (options.batch,), generator=generator)
    starts = torch.randint(windows.shape[1] - length + 1, (options.batch,), generator=generator)
    rows = [windows[w, s : s + length].long() for w, s in zip(chosen.tolist(), starts.tolist(), strict=True)]
    ids = torch.stack(rows)
    ids[:, 0] = windows[chosen, 0].long()  # BOS, or the window's own first token
    return ids


def _divergence(
    model: Any,
    checkpoint: Checkpoint,
    ids: torch.Tensor,
    parameters: _Parameters,
    weights: Mapping[SiteKey, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean KL(dense || sparse) over the second half of `ids` [B, S], and the sparsity there; both differentiable."""
    half = ids.shape[1] // 2
    shares: list[torch.Tensor] = []

    def function(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        key = (layer, site)
        if key not in weights:
            return None
        offset = parameters.offsets[key]
        shifted = x[:, half:].float() - offset
        ratio = shifted.abs() * torch.exp(-parameters.log_thresholds[key])
        soft = torch.sigmoid((ratio - 1) / _SOFTNESS)
        mask = (ratio > 1).float() + soft - soft.detach()
        shares.append((1 - mask.mean()) * weights[key])
        return torch.cat([x[:, :half], (offset + shifted * mask).to(x.dtype)], 1)

    with torch.no_grad():
        dense = model(ids, use_cache=False, logits_to_keep=ids.shape[1] - half).logits
    embedded = model.get_input_embeddings()(ids)
    with site_hooks(list(enumerate(backbone_of(model).layers)), checkpoint.family, function):
        sparse = model(inputs_embeds=embedded, use_cache=False, logits_to_keep=ids.shape[1] - half).logits
    log_p, log_q = (functional.log_softmax(logits.float(), -1) for logits in (dense, sparse))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return divergence, torch.stack(shares).sum()


@torch.no_grad()
def _realised(
    model: Any,
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    options: AllocationOptions,
    parameters: _Parameters,
    weights: Mapping[SiteKey, float],
) -> dict[SiteKey, float]:
    """Share of inactive channels of each site at the learnt thresholds, over a few calibration windows."""
    inactive = dict.fromkeys(weights, 0.0)
    half = windows.shape[1] // 2

    def function(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        key = (layer, site)
        if key not in weights:
            return None
        offset = parameters.offsets[key]
        shifted = x[:, half:].float() - offset
        active = shifted.abs() > parameters.log_thresholds[key].exp()
        inactive[key] += float((~active).float().mean()) / len(chosen)
        return torch.cat([x[:, :half], torch.where(active, x[:, half:], offset.to(x.dtype))], 1)

    chosen = spread_windows(windows, options.windows)
    with site_hooks(list(enumerate(backbone_of(model).layers)), checkpoint.family, function):
        for ids in chosen:
            model.base_model(ids[None].to(options.device), use_cache=False)
    return inactive


def _shifted(
    realised: Mapping[SiteKey, float], weights: Mapping[SiteKey, float], target: float
) -> dict[SiteKey, float]:
    """All sparsities moved by one amount so that their weighted mean is the target."""
    low, high, highest = -1.0, 1.0, max(_HIGHEST, target)
    for _ in range(60):
        middle = (low + high) / 2
        moved = {key: min(max(value + middle, 0.0), highest) for key, value in realised.items()}
        if sum(moved[key] * weights[key] for key in moved) > target:
            high = middle
        else:
            low = middle
    return moved


def _learnt(
    parameters: _Parameters, options: AllocationOptions, sparsities: Mapping[SiteKey, float]
) -> dict[SiteKey, SiteRule]:
    rules = {}
    for key, logs in parameters.log_thresholds.items():
        relative = logs.detach().cpu() - logs.detach().cpu().mean()
        offset = parameters.offsets[key].detach().cpu() if options.offsets else None
        rules[key] = SiteRule(offset=offset, channel_weights=torch.exp(-relative), sparsity=sparsities[key])
    return rules
