"""The divergence with gradients that thresholds and bases are trained on, beside the plain way to compute it."""

from collections.abc import Callable

import pytest
import torch
from devices import ON_CUDA
from models_for_tests import OPT, WINDOWED, make_model, make_opt
from pairwise import each_value
from torch.nn import functional

from sparsepack.calibrate import teal as in_parts
from sparsepack.calibrate.learned import SoftChannels
from sparsepack.calibrate.teal import divergence
from sparsepack.calibrate.uniform import weights_of
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model

Found = tuple[torch.Tensor, torch.Tensor]


class Case:
    """A model with thresholds for all of its sites, and windows to run."""

    def __init__(self, folder, device="cpu", dtype=torch.float32, shape=(3, 21)):
        checkpoint = open_checkpoint(folder)
        self.family, self.model = checkpoint.family, load_model(checkpoint, device, dtype)
        self.weights = weights_of(checkpoint, [(n, site) for n in range(checkpoint.layers) for site in SITES])
        self.channels = SoftChannels()
        for n, site in self.weights:
            columns = checkpoint.stacked_shape(site, n)[1]
            self.channels.begin((n, site), torch.full((columns,), 0.3, device=device), offsets=True)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(checkpoint.config.vocab_size, shape, generator=generator).to(device)

    def sparse(self, layer, site, x):
        changed, inactive = self.channels.sparse((layer, site), x)
        return changed, inactive * self.weights[layer, site]

    def in_parts(self) -> Found:
        return divergence(self.model, self.family, self.ids, self.sparse)

    def plain(self) -> Found:
        """Both runs whole, with every intermediate kept."""
        half, shares = self.ids.shape[1] // 2, []

        def second_half(layer, site, x):
            changed, share = self.sparse(layer, site, x[:, half:])
            shares.append(share)
            return torch.cat([x[:, :half], changed], 1)

        with torch.no_grad():
            dense = self.model(self.ids, use_cache=False).logits[:, half:]
        with site_hooks(list(enumerate(backbone_of(self.model).layers)), self.family, second_half):
            sparse = self.model(self.ids, use_cache=False).logits[:, half:]
        log_p, log_q = (functional.log_softmax(logits.float(), -1) for logits in (dense, sparse))
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean(), torch.stack(shares).sum()

    def found(self, way: Callable[[], Found]) -> list[torch.Tensor]:
        """Divergence, sparsity, and the gradients of thresholds and offsets."""
        kl, sparsity = way()
        (kl + sparsity).backward()
        trained = [tensor for group in self.channels.groups() for tensor in group["params"]]
        gradients = [tensor.grad.clone() for tensor in trained]
        for tensor in trained:
            tensor.grad = None
        return [kl.detach(), sparsity.detach(), *gradients]


def _same(one: list[torch.Tensor], other: list[torch.Tensor], rtol: float) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


@each_value({"family": WINDOWED, "windowed": [False, True]})
def test_halves_apart_are_the_whole_windows(tmp_path, family, windowed):
    changes = {"tie_word_embeddings": False, **(WINDOWED[family] if windowed else {})}
    if family.startswith("granite"):  # a random one's logits are too small to diverge
        changes |= {"logits_scaling": 1 / 64, "residual_multiplier": 1.0}
    if family == "cohere2":
        changes |= {"logit_scale": 4.0}
    if family == "hyperclovax":
        changes |= {"logits_scaling": 4.0, "embedding_multiplier": 1.0}
    case = Case(make_model(tmp_path / "m", family, **changes))
    found = case.found(case.in_parts)
    # A scaled embedding outweighs what blocks with norms behind them add.
    assert found[0] > (1e-4 if case.family.norm_offset or case.family.layer_scalar else 0.01)
    assert 0.05 < found[1] < 0.95
    # Chunks of a state begin elsewhere, and add in another order.
    _same(found, case.found(case.plain), 2e-4 if case.family.delta_net else 1e-4)
    assert not any("forward" in vars(block) for block in backbone_of(case.model).layers)


def test_halves_apart_are_the_whole_windows_in_opt(tmp_path):
    case = Case(make_opt(tmp_path / "m", **OPT["opt, narrow embedding, norms after"]))
    _same(case.found(case.in_parts), case.found(case.plain), 1e-4)


def test_a_run_is_the_same_bit_for_bit_again(tmp_path):
    case = Case(make_model(tmp_path / "m"))
    _same(case.found(case.in_parts), case.found(case.in_parts), 0)


def test_logits_in_parts_are_the_logits(tmp_path, monkeypatch):
    case = Case(make_model(tmp_path / "m"))
    whole, seen = case.found(case.in_parts), []
    head = case.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape[0]))
    monkeypatch.setattr(in_parts, "LOGITS", 5 * head.out_features + 1)
    _same(case.found(case.in_parts), whole, 1e-5)
    assert max(seen) == 5
    assert sum(seen) == 4 * 33  # dense and sparse, forwards and backwards


def test_an_error_in_a_pass_leaves_the_model_as_it_was(tmp_path):
    case = Case(make_model(tmp_path / "m"))
    before = case.found(case.in_parts)
    with pytest.raises(ZeroDivisionError):
        divergence(case.model, case.family, case.ids, lambda *_: 1 / 0)
    _same(case.found(case.in_parts), before, 0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_the_backward_pass_needs_a_fraction_of_the_memory(tmp_path, monkeypatch, device):
    """Eight blocks, 4 windows of 512 tokens and 32,000 tokens in the vocabulary."""
    monkeypatch.setattr(in_parts, "LOGITS", 1 << 23)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    folder = make_model(tmp_path / "m", **sizes, num_attention_heads=16, vocab_size=32000)
    case = Case(folder, device, torch.bfloat16, (4, 512))
    peaks = []
    for way in (case.in_parts, case.plain):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.found(way)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print("peak above the model:", *(peak >> 20 for peak in peaks), "MiB")
    assert peaks[0] < 0.4 * peaks[1]
