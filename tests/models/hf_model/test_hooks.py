"""Hooks see each site once, change what its projections read, and leave nothing behind."""

import pytest
import torch
from model_variants import FOLDERS

from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.sites import SiteRule, active_channels, sparsify

IDS = torch.arange(20).reshape(2, 10)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_site_is_seen_once_per_pass_in_order_of_execution(folders, name):
    checkpoint, seen = open_checkpoint(folders(name)), []
    model = load_model(checkpoint)
    with site_hooks(list(enumerate(model.model.layers)), checkpoint.family, lambda *what: seen.append(what)):
        for _ in range(2):
            model(IDS)
    once = [(layer, site) for layer in range(checkpoint.layers) for site in SITES]
    assert [(layer, site) for layer, site, _ in seen] == once * 2
    for _, site, x in seen:
        assert x.shape == (2, 10, checkpoint.stacked_shape(site)[1])


def test_every_projection_of_a_site_reads_the_vector_put_in_its_place(folders):
    checkpoint = open_checkpoint(folders("llama"))
    model = load_model(checkpoint)
    block, read = model.model.layers[1], {}
    for site, names in checkpoint.family.projections.items():
        for name in names:
            module = block.get_submodule(name)
            module.register_forward_hook(lambda m, inputs, _, key=(site, name): read.update({key: inputs[0]}))
    put = {}

    def double(layer, site, x):
        put[site] = 2 * x
        return put[site]

    with site_hooks([(1, block)], checkpoint.family, double):
        model(IDS)
    assert len(read) == 7
    assert all(value.data_ptr() == put[site].data_ptr() for (site, _), value in read.items())


def test_hooks_are_gone_after_the_context_also_when_it_fails(folders):
    checkpoint = open_checkpoint(folders("llama"))
    model = load_model(checkpoint)
    blocks = list(enumerate(model.model.layers))
    with torch.inference_mode():
        before = model(IDS).logits
        with site_hooks(blocks, checkpoint.family, lambda *_: None):
            assert torch.equal(model(IDS).logits, before)
        with site_hooks(blocks, checkpoint.family, lambda _, __, x: torch.zeros_like(x)):
            assert not torch.equal(model(IDS).logits, before)
        with pytest.raises(RuntimeError, match="interrupted"), site_hooks(blocks, checkpoint.family, _interrupted):
            model(IDS)
        assert torch.equal(model(IDS).logits, before)


def _interrupted(layer, site, x):
    raise RuntimeError("interrupted")


def test_a_channel_is_active_strictly_above_its_threshold():
    x = torch.tensor([[-0.5, 0.5, 0.6, 0.0], [-0.7, 0.4, -0.5, 2.0]])
    assert active_channels(x, SiteRule(torch.tensor(0.5))).tolist() == [
        [False, False, True, False],
        [True, False, False, True],
    ]
    each = torch.tensor([0.6, 0.0, torch.inf, 0.0])
    assert active_channels(x, SiteRule(each)).tolist() == [[False, True, False, False], [True, True, False, True]]
    assert torch.equal(sparsify(x, SiteRule(each)), torch.tensor([[0, 0.5, 0, 0], [-0.7, 0.4, 0, 2.0]]))


def test_an_inactive_channel_stands_at_its_offset():
    x = torch.tensor([[1.0, -1.0, 3.0]])
    rule = SiteRule(torch.tensor(0.5), torch.tensor([1.25, 0.0, 2.75]))
    assert torch.equal(sparsify(x, rule), torch.tensor([[1.25, -1.0, 2.75]]))


def test_thresholds_are_compared_in_float32_whatever_the_input_is():
    """In bfloat16 this threshold would round to the value itself."""
    x = torch.tensor([[0.5]], dtype=torch.bfloat16)
    assert active_channels(x, SiteRule(torch.tensor(0.5 - 1e-6))).item()
    assert sparsify(x, SiteRule(torch.tensor(0.5), torch.tensor([0.1]))).dtype == torch.bfloat16
