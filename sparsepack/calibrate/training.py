"""Training against the divergence of the model's output, at a fixed sparsity: the loop, and going on after a kill.

Several workers may share the windows of a step. Each part of them has a backward pass of its own, whoever runs it, and
gradients are added in the order of the parts: every worker takes the same step, with the bits of one alone.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sparsepack.errors import CheckpointError, WorkersError
from sparsepack.models.hf_model.halves import repeatable
from sparsepack.progress import Shorter, progress
from sparsepack.workers.shard import Shard
from sparsepack.workers.state import pause_after

Found = tuple[torch.Tensor, torch.Tensor]
"""Divergence and sparsity of some windows, differentiable."""

Loss = Callable[[torch.Tensor], Found]
"""A loss takes windows of token ids [B, S] on the device; what it finds are means over them."""

Train = Callable[[str, list[dict[str, Any]], torch.Tensor, Loss], None]
"""Takes a label, parameters with their learning rates as Adam takes them, windows [N, S] and a loss; the parameters are
trained then."""

PART = 1
"""So many windows have a backward pass of their own where workers may share them."""

_STIFFNESS, _DUAL_RATE = 10.0, 0.3  # augmented Lagrangian that holds the sparsity


def trained_tokens(steps: int, batch: int, length: int) -> int:
    """The tokens that a training takes through all blocks: each window once, and its second half forwards, forwards
    again and backwards."""
    return steps * batch * (length + 3 * (length - length // 2))


class TrainingOptions(Protocol):
    """What a training is asked for: `AllocationOptions` says what each means."""

    @property
    def sparsity(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def device(self) -> str: ...


class Training:
    """The optimiser of the parameters, the price of sparsity and the random numbers, as far as step `step`.

    All of it, and the parameters, are saved now and then: going on from there is the same, bit for bit, as never
    having stopped, with another number of workers, too. The first of several saves it.

    groups -- the parameters and their learning rates, as Adam takes them; every one is a leaf on the device
    part   -- windows of a step that have a backward pass of their own, and are dealt to workers; None: all of them
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: TrainingOptions,
        shard: Shard,
        part: int | None = None,
    ) -> None:
        self.options, self.shard, self.state = options, shard.split(options.batch, part or options.batch), shard.state
        self.step = 0
        self.price: float | None = None
        self.generator = torch.Generator().manual_seed(options.seed)
        self.optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min(1.0, 2 * (1 - step / options.steps))
        )
        if "learning" in self.state.parts:
            self._resume()
        self.saved, self.pause = time.monotonic(), pause_after(0)

    def run(self, label: str, windows: torch.Tensor, loss: Loss) -> None:
        """Take the steps that are left, on stretches of `windows` [N, S]."""
        steps = self.options.steps
        with (
            repeatable(self.options.device),
            progress(label, steps, self.step, 1, Shorter("--steps", steps)) as advance,
        ):
            while self.step < steps:
                ids = self.shard.own(slices(windows, self.options, self.generator)).to(self.options.device)
                self.descend([loss(part) for part in torch.split(ids, self.shard.batch)])
                advance()

    def descend(self, found: Sequence[Found]) -> None:
        """One step down the divergence, at the price of sparsity, which follows the gap to the target.

        found -- by this worker's parts of the step
        """
        divergence, sparsity = self._means(found)
        if not math.isfinite(divergence):
            raise CheckpointError(
                f"step {self.step + 1}: the divergence is {divergence}: the model's values overflow; try --dtype "
                "float32, or copy or export its weights again"
            )
        # dKL/ds at half sparsity is about four times the divergence itself.
        price = 4 * divergence if self.price is None else self.price
        gap = self.options.sparsity - sparsity
        # Of the loss, divergence + price * gap + _STIFFNESS / 2 * gap^2, this is the derivative by the sparsity.
        slope = -(price + _STIFFNESS * gap)
        self._descend_parts([(each + slope * share) / self.shard.parts for each, share in found])
        self.optimiser.step()
        self.schedule.step()
        self.price = price + _DUAL_RATE * gap
        self.step += 1
        if self.step == self.options.steps or time.monotonic() - self.saved >= self.pause:
            self._save()

    def _means(self, found: Sequence[Found]) -> list[float]:
        """Divergence and sparsity of the whole step: means over the parts of all workers, in their order."""
        said = self.shard.all_gather([[float(value.detach()) for value in values] for values in found])
        parts = [said[part % len(said)][part // len(said)] for part in range(self.shard.parts)]
        return [sum(values) / len(parts) for values in zip(*parts, strict=True)]

    def _descend_parts(self, losses: Sequence[torch.Tensor]) -> None:
        """Give each parameter the sum of the gradients of all parts, added in their order."""
        trained = self._trained()
        self.optimiser.zero_grad()
        if self.shard.world_size == 1:
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            return
        total: torch.Tensor | None = None

        def done(having: int) -> None:
            nonlocal total
            own = {"gradients": torch.cat([_gradient(parameter).flatten() for parameter in trained])}
            for each in self.shard.gather_in_order(own, having):
                gradients = each["gradients"]
                total = gradients if total is None else total + gradients.to(total.device)
            self.optimiser.zero_grad()

        part_done = self.shard.after_each(done)
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
            part_done()
        whole = self.shard.broadcast_tensors({} if total is None else {"": total})[""]
        for parameter, gradient in zip(trained, torch.split(whole, [each.numel() for each in trained]), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.device)

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    def _save(self) -> None:
        began = time.monotonic()
        adam = self.optimiser.state_dict()
        tensors = {f"parameter.{n}": parameter.detach() for n, parameter in enumerate(self._trained())}
        tensors |= {f"adam.{n}.{name}": x for n, moments in adam["state"].items() for name, x in moments.items()}
        if "learning" in self.state.parts:
            self.state.drop(kept_at(self.state.parts["learning"]["step"]))
        self.state.keep("learning", kept_at(self.step), {**tensors, "generator": self.generator.get_state()})
        values = {"step": self.step, "price": self.price, "groups": adam["param_groups"]}
        self.state.commit("learning", **values, schedule=self.schedule.state_dict())
        self.saved = time.monotonic()
        self.pause = pause_after(self.saved - began)

    @torch.no_grad()
    def _resume(self) -> None:
        kept = self.state.parts["learning"]
        self.step, self.price = kept["step"], kept["price"]
        if type(self.step) is not int or not 0 < self.step <= self.options.steps:
            raise ValueError(f"step {str(self.step)[:60]} of {self.options.steps}")
        tensors = self.shard.broadcast_tensors(self.state.kept(kept_at(self.step)))
        self.generator.set_state(tensors.pop("generator"))
        for n, parameter in enumerate(self._trained()):
            parameter.copy_(tensors.pop(f"parameter.{n}"))
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            _, place, name = key.split(".")
            moments.setdefault(int(place), {})[name] = value
        self.optimiser.load_state_dict({"state": moments, "param_groups": kept["groups"]})
        self.schedule.load_state_dict(kept["schedule"])


def trainer(shard: Shard, options: TrainingOptions) -> Train:
    """What trains with the other workers, who share the windows of a step, and goes on from the state."""
    return lambda label, groups, windows, loss: Training(groups, options, shard, PART).run(label, windows, loss)


def check_share(workers: int, batch: int) -> None:
    """Raise `WorkersError` where a worker would have no window of a step with so many."""
    if workers > batch:
        raise WorkersError(
            f"{workers} workers for {batch} windows in a step: some would be idle; start {batch} at most, or "
            "give a larger --batch"
        )


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def kept_at(step: int) -> str:
    """The name of what is kept of the training after a step."""
    return f"learning-{step}"


def slices(windows: torch.Tensor, options: TrainingOptions, generator: torch.Generator) -> torch.Tensor:
    """Random stretches of the calibration windows [batch, length], each beginning with its window's first token."""
    length = min(options.length, windows.shape[1])
    chosen = torch.randint(len(windows), (options.batch,), generator=generator)
    starts = torch.randint(windows.shape[1] - length + 1, (options.batch,), generator=generator)
    rows = [windows[w, s : s + length].long() for w, s in zip(chosen.tolist(), starts.tolist(), strict=True)]
    ids = torch.stack(rows)
    ids[:, 0] = windows[chosen, 0].long()  # BOS, or the window's own first token
    return ids
