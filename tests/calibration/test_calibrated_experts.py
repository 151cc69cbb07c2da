"""Calibrating mixtures of experts: who was given how many tokens, and thresholds pooled over a block's experts."""

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.collector import column_norms
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.statistics import FEW, activity, given, has_experts, told_of_starved
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.cli.app import main
from sparsepack.errors import CalibrationError, ThresholdsError
from sparsepack.files.text import Text
from sparsepack.inspection import detect_kind
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import MLP_SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.model import load_model

CONTEXT, SAMPLES = 64, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("experts") / "m", "qwen3_moe"))


@pytest.fixture(scope="module")
def calibration(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    options = CalibrateOptions(context=CONTEXT, samples=SAMPLES, batch=4)
    path = tmp_path_factory.mktemp("experts") / "c"
    calibrate(model, Text("topics", (TEXT[:6000],), "topics"), path, options)
    return folder.load(path)


def test_tokens_of_experts_are_those_that_the_stock_router_gives(model: Checkpoint, calibration: Calibration) -> None:
    stock = load_model(model)
    seen: list[torch.Tensor] = []
    for layer in stock.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    sinks = calibration.manifest["tokens"]["sinks"]
    with torch.inference_mode():
        stock(calibration.windows.long())
    counts = given(calibration)
    for layer, chosen in enumerate(seen):
        counted = chosen.view(SAMPLES, -1, 2)[:, sinks:]
        assert torch.equal(counts[layer], torch.bincount(counted.flatten(), minlength=8))
    assert has_experts(calibration)
    for layer, of_layer in enumerate(activity(calibration)):
        assert torch.equal(of_layer.active, counts[layer])
        assert of_layer.density == pytest.approx(2 / 8)
        assert of_layer.spread == 0


def test_inspect_shows_how_many_tokens_experts_were_given(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c"
    folder.save(calibration, path)
    found = detect_kind(path).read(path)
    assert found["given"] == given(calibration).tolist()
    shown = CliRunner().invoke(main, ["inspect", str(path)]).output
    for block, counts in enumerate(found["given"]):
        assert re.search(rf"\| +{block} \| +{min(counts)} \| +{sorted(counts)[4]} \| +{max(counts)} \|", shown)


def test_pooled_counts_have_every_channel_of_every_expert_that_a_token_has(calibration: Calibration) -> None:
    tokens = calibration.manifest["tokens"]["counted"]
    for statistics in calibration.layers:
        assert int(statistics["mlp_in.histogram.magnitude"].sum()) == tokens * 256
        assert int(statistics["mlp_mid.histogram.magnitude"].sum()) == tokens * 2 * 256
        assert statistics["mlp_mid.second_moment"].shape == (256,)


@pytest.mark.parametrize(
    ("allocation", "upstream"), [("fisher", "sparse"), ("uniform", "sparse"), ("uniform", "dense"), ("teal", "sparse")]
)
def test_thresholds_realise_their_target(
    model: Checkpoint, calibration: Calibration, allocation: str, upstream: str
) -> None:
    options = AllocationOptions(sparsity=0.4, allocation=allocation, upstream=upstream)
    table = find_thresholds(model, calibration, options)
    outlook = table.outlook()
    assert outlook is not None
    assert outlook.overall == pytest.approx(0.4, abs=0.01)
    assert all(rule.realised == pytest.approx(rule.sparsity, abs=0.01) for rule in table.rules.values())
    assert table.weights[0, "mlp_in"] == 2 * 512 * 256  # of the experts that a token has
    table.check_model(model)


def test_what_enters_a_shared_expert_is_pooled_with_the_others(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "qwen2_moe"))
    options = CalibrateOptions(context=CONTEXT, samples=SAMPLES, batch=4)
    made = calibrate(checkpoint, Text("topics", (TEXT[:6000],), "topics"), tmp_path / "c", options)
    tokens = made.manifest["tokens"]["counted"]
    for layer, statistics in enumerate(made.layers):
        assert int(statistics["mlp_in.histogram.magnitude"].sum()) == tokens * 256
        assert int(statistics["mlp_mid.histogram.magnitude"].sum()) == tokens * (2 + 2) * 256
        assert int(given(made)[layer].sum()) == tokens * 2  # of those that the router chooses
        assert len(given(made)[layer]) == 8
    table = find_thresholds(checkpoint, made, AllocationOptions(sparsity=0.4, allocation="uniform"))
    assert all(rule.realised == pytest.approx(0.4, abs=0.01) for rule in table.rules.values())
    assert table.weights[0, "mlp_in"] == (2 + 2) * 512 * 256


def test_column_norms_are_those_of_all_experts(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "qwen2_moe", num_hidden_layers=1))
    stream = BlockStream(checkpoint)
    stream.load(0)
    for site in MLP_SITES:
        expected = checkpoint.stacked(0, site)[0].float().norm(dim=0)
        assert torch.allclose(column_norms(stream.block, checkpoint.family, site), expected, rtol=1e-4)


@pytest.mark.parametrize("options", [{"allocation": "uniform", "criterion": "column-norm"}, {"allocation": "global"}])
def test_a_weight_for_each_channel_is_refused(
    model: Checkpoint, calibration: Calibration, options: dict[str, str]
) -> None:
    with pytest.raises(ThresholdsError, match=r"pooled over the experts of a block.*; use "):
        find_thresholds(model, calibration, AllocationOptions(sparsity=0.4, **options))


def test_an_expert_that_no_token_reached_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder_of_model = make_model(tmp_path / "m", "mixtral", num_hidden_layers=1)
    checkpoint = open_checkpoint(folder_of_model)
    name = "model.layers.0.mlp.gate.weight"
    router = checkpoint.tensor(name).float()
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder_of_model / "model.safetensors")
    router[3] = 0  # its logit is never among the largest two of eight
    router[:3], router[4:] = router[:3].abs(), router[4:].abs()
    stored = name.replace(".mlp.", ".block_sparse_moe.")
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    tensors["model.layers.0.post_attention_layernorm.weight"] = norm.abs()
    tensors[stored] = router.bfloat16()
    save_file(tensors, folder_of_model / "model.safetensors", {"format": "pt"})
    made = calibrate(
        folder_of_model, Text("t", (TEXT[:3000],), "t"), tmp_path / "c", CalibrateOptions(context=16, samples=2)
    )
    few = given(made) < FEW
    told = told_of_starved(made)
    assert told is not None
    assert told.startswith(f"{int(few.sum())} of 8 experts were given fewer than {FEW} tokens")
    assert f"{int((given(made) == 0).sum())} of them none" in told
    assert told in capfd.readouterr().err


def test_calibrations_add_up(model: Checkpoint, calibration: Calibration, tmp_path: Path) -> None:
    options = CalibrateOptions(context=CONTEXT, samples=2, batch=4, seed=3)
    other = calibrate(model, Text("other", (TEXT[9000:14000],), "other"), tmp_path / "c", options)
    merged = folder.merge(calibration, other)
    assert torch.equal(given(merged), given(calibration) + given(other))


def test_counts_that_contradict_each_other_are_refused(calibration: Calibration) -> None:
    layers = [dict(layer) for layer in calibration.layers]
    layers[1]["experts.given"] = layers[1]["experts.given"] + 1
    with pytest.raises(CalibrationError, match=r"experts\.given of block 1 is no count of the tokens"):
        given(Calibration(calibration.manifest, tuple(layers), calibration.windows))
