"""`fisher`: gradients of the model's own output, the share that each site gets, and what is lost beside `uniform`."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from accuracy import divergence, realised, windows_of
from models_for_tests import make_model

from sparsepack.calibrate import histogram
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.fisher import find_rules, gradients, shares_at_sparsity
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.uniform import weights_of
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import MLP_SITES, SITES
from sparsepack.models.hf_config import expert_numbers
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model
from sparsepack.runtime.reference.products import route, with_shared

HALF = AllocationOptions(0.5)


def all_sites(checkpoint):
    return weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral"])
def test_gradients_block_by_block_are_those_of_the_whole_model(family, tmp_path, text):
    checkpoint = open_checkpoint(make_model(tmp_path / "m", family))
    calibration = calibrate(checkpoint, text, tmp_path / "c", CalibrateOptions(context=64, samples=2))
    ids = calibration.windows.long()
    found = {key: (seen.x, seen.at_input) for key, seen in gradients(checkpoint, ids, HALF)}
    assert len(found) == checkpoint.layers * len(SITES)
    model, seen = load_model(checkpoint, "cpu", torch.float32), {}

    def function(layer, site, x):
        seen[layer, site] = x.view_as(x)
        return seen[layer, site]

    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad(), site_hooks(list(enumerate(backbone_of(model).layers)), checkpoint.family, function):
        for number, row in enumerate(ids):
            embedded = model.get_input_embeddings()(row[None]).detach().requires_grad_()
            log_p = model(inputs_embeds=embedded, use_cache=False).logits[0].float().log_softmax(-1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            slopes = torch.autograd.grad(log_p.gather(1, drawn).sum(), [*seen.values()])
            for (key, x), slope in zip(seen.items(), slopes, strict=True):
                here, ours = (each[number : number + 1] for each in found[key])
                assert torch.allclose(here, x.detach()[:, 4:], atol=1e-5), key
                assert torch.allclose(ours, slope[:, 4:], atol=1e-4 * float(slope.abs().max())), key


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_gradients_of_an_expert_s_outputs_are_those_of_the_block_times_its_weight(family, tmp_path, text):
    checkpoint = open_checkpoint(make_model(tmp_path / "m", family))
    calibration = calibrate(checkpoint, text, tmp_path / "c", CalibrateOptions(context=64, samples=1))
    ids, numbers = calibration.windows.long(), expert_numbers(checkpoint.config)
    found = {key: seen for key, seen in gradients(checkpoint, ids, HALF) if key[1] in MLP_SITES}
    model, inputs, outputs = load_model(checkpoint, "cpu", torch.float32), {}, {}

    def kept(layer, site, x):
        inputs[layer, site] = x.detach()[0]

    def left(layer, _, __, y):
        outputs[layer] = y.view_as(y)
        return outputs[layer]

    blocks = list(enumerate(backbone_of(model).layers))
    for layer, block in blocks:
        block.register_forward_hook(partial(left, layer))
    with torch.enable_grad(), site_hooks(blocks, checkpoint.family, kept):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        log_p = model(inputs_embeds=embedded, use_cache=False).logits[0].float().log_softmax(-1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=torch.Generator().manual_seed(0))
        slopes = torch.autograd.grad(log_p.gather(1, drawn).sum(), [*outputs.values()])
    for (layer, block), slope in zip(blocks, slopes, strict=True):
        x, seen = inputs[layer, "mlp_in"], found[layer, "mlp_mid"]
        router = block.get_parameter(f"{checkpoint.family.experts.router}.weight")
        chosen, weights = route(x, router, numbers.used, numbers.normalised)
        if numbers.shared:
            gate = block.get_parameter(f"{checkpoint.family.experts.shared.gate}.weight")
            chosen, weights = with_shared(x, gate, range(numbers.count, numbers.stored), chosen, weights)
        assert torch.equal(seen.chosen[0], chosen[4:])
        of_rows = torch.zeros(numbers.stored, slope.shape[-1])
        for expert in range(numbers.stored):
            weight = torch.where(chosen == expert, weights, 0).sum(1)[:, None]
            of_rows[expert] = (weight * slope[0])[4:].square().mean(0)
        assert torch.allclose(seen.of_rows, of_rows, rtol=1e-3, atol=1e-6 * float(of_rows.max())), layer
        into = found[layer, "mlp_in"].of_rows
        assert into.shape == (numbers.stored, 2 * checkpoint.stacked_shape("mlp_mid")[1])
        assert torch.equal((into > 0).any(1), torch.bincount(chosen[4:].flatten(), minlength=numbers.stored) > 0)


def test_one_threshold_gives_every_site_its_share(small, small_calibration):
    weights = all_sites(small)
    rules = find_rules(small, small_calibration, HALF, weights)
    assert sum(weights[key] * rule.sparsity for key, rule in rules.items()) == pytest.approx(0.5, abs=2e-3)
    assert len({round(rule.sparsity, 3) for rule in rules.values()}) > 4
    assert all(rule.channel_weights.log().mean() == pytest.approx(0, abs=1e-4) for rule in rules.values())


def test_a_channel_counts_by_the_root_of_its_mean_square_gradient(small, small_calibration):
    few = replace(small_calibration, windows=small_calibration.windows[:2])
    rules = find_rules(small, few, HALF, all_sites(small))
    for key, seen in gradients(small, few.windows, HALF):
        root = seen.at_input.square().mean((0, 1)).sqrt()
        counted = root > 1e-2 * root.max()  # the others may be raised
        ratio = rules[key].channel_weights[counted] / root[counted]
        assert torch.allclose(ratio, ratio[:1], rtol=1e-4), key


def test_one_threshold_splits_all_weights_at_the_target():
    scores = torch.arange(1.0, 101)
    counts = {(0, "a"): histogram.count(scores), (0, "b"): histogram.count(scores + 100)}
    weights = {(0, "a"): 0.5, (0, "b"): 0.5}
    shares = shares_at_sparsity(counts, {(0, "a"): 1.0, (0, "b"): 1.0}, weights, 0.25)
    assert shares == {(0, "a"): pytest.approx(0.5, abs=0.01), (0, "b"): 0}
    shares = shares_at_sparsity(counts, {(0, "a"): 1e-12, (0, "b"): 1e-15}, weights, 0.5)
    assert shares == {(0, "a"): pytest.approx(0.02, abs=0.02), (0, "b"): pytest.approx(0.98, abs=0.02)}


def test_a_model_whose_output_does_not_move_gets_the_target_all_the_same(tmp_path, text):
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "qwen3"))  # a random one is sure of every word
    calibration = calibrate(checkpoint, text, tmp_path / "c", CalibrateOptions(context=64, samples=8))
    weights = all_sites(checkpoint)
    rules = find_rules(checkpoint, calibration, HALF, weights)
    assert sum(weights[key] * rule.sparsity for key, rule in rules.items()) == pytest.approx(0.5, abs=2e-3)


def test_less_is_lost_than_by_the_same_share_everywhere(tiny, tiny_calibration):
    used = {tuple(row) for row in tiny_calibration.windows.tolist()}
    inputs, targets = windows_of(tiny, read_text("shipped:train"), 128, 40)
    fresh = torch.tensor([tuple(row) not in used for row in inputs.tolist()])
    windows = inputs[fresh], targets[fresh]
    tables = [
        find_thresholds(tiny, tiny_calibration, AllocationOptions(0.5, allocation=name))
        for name in ("fisher", "uniform")
    ]
    overall, _ = realised(open_subject(tiny.name, tables[0]), windows)
    assert abs(overall - 0.5) < 0.02
    fisher, uniform = (divergence(tiny, table, windows) for table in tables)
    assert fisher < 0.9 * uniform


def test_sites_that_may_not_be_sparse_stay_dense_and_the_others_take_the_target(small, small_calibration):
    table = find_thresholds(small, small_calibration, AllocationOptions(0.4, ignore=("blk.0.*", "blk.*.mlp_mid")))
    sparse = {key: rule for key, rule in table.rules.items() if not rule.dense}
    assert not any(layer == 0 or site == "mlp_mid" for layer, site in sparse)
    weights = weights_of(small, list(sparse))
    assert sum(weights[key] * rule.realised for key, rule in sparse.items()) == pytest.approx(0.4, abs=0.02)
