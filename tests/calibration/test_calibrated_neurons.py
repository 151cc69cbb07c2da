"""What a calibration says of neurons: who is active, against the stock model; merged ones, damaged ones."""

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import make_model

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.statistics import activity
from sparsepack.cli.commands.inspect import inspect
from sparsepack.errors import CalibrationError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model

OPTIONS = CalibrateOptions(context=40, samples=5, sinks=3)


@pytest.fixture(scope="module")
def relu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relu") / "m"
    return open_checkpoint(make_model(folder, "qwen2", num_hidden_layers=3, hidden_act="relu"))


@pytest.fixture(scope="module")
def relu_calibration(relu, text, tmp_path_factory):
    return calibrate(relu, text, tmp_path_factory.mktemp("cal") / "c", OPTIONS)


def test_active_are_the_neurons_whose_activation_times_up_is_not_zero_in_the_stock_model(relu, relu_calibration):
    model, products = load_model(relu), {}
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate_proj.register_forward_hook(lambda _, __, out, n=layer: products.update({n: out.relu()}))
        block.mlp.up_proj.register_forward_hook(lambda _, __, out, n=layer: products.update({n: products[n] * out}))
    with torch.inference_mode():
        model.model(relu_calibration.windows.long())
    for layer, found in enumerate(activity(relu_calibration)):
        active = (products[layer][:, 3:] != 0).flatten(0, 1)
        assert found.tokens == len(active) == relu_calibration.manifest["tokens"]["counted"]
        # Batched products may differ in the last bit: hardly ever on which side of zero.
        assert (found.active - active.sum(0)).abs().sum() <= 3
        assert found.density == pytest.approx(float(active.double().mean()), abs=1e-4)
        assert found.spread == pytest.approx(float(active.double().mean(1).std(correction=0)), abs=1e-4)
        assert 0.2 < found.density < 0.8
        torch.testing.assert_close(found.frequency, active.double().mean(0), rtol=0, atol=2 / len(active))


def test_what_enters_the_last_matrix_is_what_is_counted(relu, relu_calibration):
    seen = {}
    model = load_model(relu)
    blocks = list(enumerate(model.model.layers))
    keep = lambda layer, site, x: seen.update({(layer, site): x[:, 3:]})  # noqa: E731
    with torch.inference_mode(), site_hooks(blocks, relu.family, keep):
        model.model(relu_calibration.windows.long())
    for layer, found in enumerate(activity(relu_calibration)):
        each = (seen[layer, "mlp_mid"] != 0).flatten(0, 1).sum(1)
        assert abs(found.squares - int(each.square().sum())) <= 3 * 2 * 512


def test_neurons_of_silu_are_always_active(small_calibration):
    for layer in activity(small_calibration):
        assert layer.density > 0.999
        assert layer.spread < 0.01


def test_merged_calibrations_count_the_tokens_of_both(relu, text, relu_calibration, tmp_path):
    other = calibrate(relu, text, tmp_path / "c", replace(OPTIONS, samples=3, seed=1))
    merged = folder.merge(relu_calibration, other)
    for one, two, both in zip(*(activity(each) for each in (relu_calibration, other, merged)), strict=True):
        assert torch.equal(one.active + two.active, both.active)
        assert (one.tokens + two.tokens, one.squares + two.squares) == (both.tokens, both.squares)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": [3]},
        {"tokens": [0]},
        {"tokens": [185, 185]},
        {"squares": [5]},
        {"squares": [2**62]},
        {"active": [400] * 512},
    ],
)
def test_counts_that_do_not_belong_together_are_refused(relu_calibration, changed):
    tensors = {f"neurons.{name}": torch.tensor(value) for name, value in changed.items()}
    layers = (relu_calibration.layers[0], relu_calibration.layers[1] | tensors, relu_calibration.layers[2])
    with pytest.raises(CalibrationError, match=r"neurons\.active of block 1 is no count of the tokens"):
        activity(replace(relu_calibration, layers=layers))


def test_counts_below_zero_are_refused(relu_calibration):
    active = relu_calibration.layers[1]["neurons.active"].clone()
    active[active.argmin()] = -1
    layers = [*relu_calibration.layers]
    layers[1] = layers[1] | {"neurons.active": active}
    with pytest.raises(CalibrationError, match=r"neurons\.active of block 1 is no count of the tokens"):
        activity(replace(relu_calibration, layers=tuple(layers)))


def test_inspect_shows_who_is_active(relu_calibration, small_calibration, tmp_path):
    for name, calibration in (("relu", relu_calibration), ("silu", small_calibration)):
        folder.save(calibration, tmp_path / name)
    told = {name: CliRunner().invoke(inspect, [str(tmp_path / name)]).output for name in ("relu", "silu")}
    assert "| block | active | spread | hottest 10 % |" in told["relu"]
    assert "own" not in told["relu"].split("neurons, over")[1], "one text has no drift between documents"
    assert "placement cannot pay: 100.0 % of the neurons are active for every token" in told["silu"]
