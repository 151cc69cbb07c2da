"""Who is active in MLPs without a gate, and under squared ReLU: counted and traced as the stock model has it."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from models_for_tests import OPT, make_model, make_opt
from transformers import AutoModelForCausalLM

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.statistics import activity, importance
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace
from sparsepack.cli.app import main
from sparsepack.errors import PackingError
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

TRACE = TraceOptions(sessions=3, tokens=48, prompt=8)
CALIBRATE = CalibrateOptions(context=40, samples=5, sinks=3)
TRACED = ("opt", "opt, narrow embedding, norms after", "opt, odd sizes")


@pytest.fixture(scope="module", params=TRACED)
def folder(request, tmp_path_factory):
    return make_opt(tmp_path_factory.mktemp("opt") / "m", **OPT[request.param])


def inputs_of_the_stock_model(folder, ids):
    """What enters each Linear of each block, by layer and name: [rows, positions, columns]."""
    stock, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False), {}
    for layer, block in enumerate(stock.model.decoder.layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.out_proj", "fc1", "fc2"):

            def keep(_, inputs, key=(layer, name)):
                found[key] = inputs[0].unflatten(0, ids.shape) if inputs[0].dim() == 2 else inputs[0]

            block.get_submodule(name).register_forward_pre_hook(keep)
    stock.eval()(ids)
    return stock, found


def test_active_are_those_whose_activation_is_not_zero_in_the_stock_model(folder, texts, tmp_path):
    made = trace(folder, texts, tmp_path / "t", TRACE)
    ids = torch.from_numpy(np.stack([made.ids(session) for session in range(3)])).long()
    stock, inputs = inputs_of_the_stock_model(folder, ids)
    for layer, block in enumerate(stock.model.decoder.layers):
        expected = (block.activation_fn(block.fc1(inputs[layer, "fc1"])) != 0).numpy()
        found = np.stack([made.active(session, layer) for session in range(3)])
        assert found.shape == expected.shape == (3, 47, stock.config.ffn_dim)
        # Batched products may differ in the last bit: hardly ever on which side of zero.
        assert (found != expected).sum() <= 3
        assert 0.2 < found.mean() < 0.8
    assert made.manifest["model"]["activation"] == "relu"


def test_statistics_are_those_of_hooks_on_the_stock_model(folder, texts, tmp_path):
    made = calibrate(folder, texts, tmp_path / "c", CALIBRATE)
    stock, inputs = inputs_of_the_stock_model(folder, made.windows.long())
    neurons = activity(made)
    sites = {"attn_in": "self_attn.q_proj", "attn_out": "self_attn.out_proj", "mlp_in": "fc1", "mlp_mid": "fc2"}
    heads = stock.config.num_attention_heads
    for layer, block in enumerate(stock.model.decoder.layers):
        statistics = made.layers[layer]
        for site, name in sites.items():
            moment = inputs[layer, name][:, 3:].double().square().flatten(0, 1).sum(0)
            torch.testing.assert_close(statistics[f"{site}.second_moment"], moment, rtol=1e-4, atol=1e-6)
            assert int(statistics[f"{site}.histogram.magnitude"].sum()) == inputs[layer, name][:, 3:].numel()
        active = inputs[layer, "fc2"][:, 3:].flatten(0, 1) != 0
        assert (neurons[layer].active - active.sum(0)).abs().sum() <= 3
        assert neurons[layer].tokens == len(active)
        for name in ("query", "key"):
            rows = block.get_submodule(f"self_attn.{name[0]}_proj")(inputs[layer, "self_attn.q_proj"])
            each = rows.unflatten(-1, (heads, -1))[:, 3:].double().abs().sum((0, 1))
            torch.testing.assert_close(statistics[f"attention.{name}_abs"], each, rtol=1e-4, atol=1e-6)
    assert len(importance(made)) == 3
    assert made.manifest["attention"]["rotary"] == {"convention": "none", "dims": 0}
    assert made.manifest["attention"]["kv_heads"] == heads


@pytest.mark.parametrize(
    "folder", [pytest.param(name, marks=[pytest.mark.long][: n > 0]) for n, name in enumerate(TRACED)], indirect=True
)
def test_the_verbs_of_placement_run_on_it(folder, texts, tmp_path):
    document = tmp_path / "text.txt"
    document.write_text("\n".join(texts.documents) * 2)
    asked = ["--text", str(document), "--tokens", "48", "--prompt", "8", "--sessions", "3"]
    told = ""
    for command in (
        ["calibrate", str(folder), "--text", str(document), "-o", str(tmp_path / "c"), "--context", "40"],
        ["inspect", str(tmp_path / "c")],
        ["trace", str(folder), *asked, "-o", str(tmp_path / "t")],
        ["inspect", str(tmp_path / "t")],
        ["simulate", str(tmp_path / "t"), "--calibration", str(tmp_path / "c"), "--json", str(tmp_path / "s.json")],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        told += result.output
    assert "model        m (opt, 3 blocks" in told.replace(str(folder), "m")
    assert told.count("neurons, over") == 2
    assert 0.2 < json.loads((tmp_path / "s.json").read_text())["density"] < 0.8


def test_squared_relu_with_a_gate_is_traced_as_sparse_and_packed_without_neurons(texts, tmp_path):
    folder = make_model(tmp_path / "m", "llama", hidden_act="relu2")
    made = trace(folder, texts, tmp_path / "t", TRACE)
    assert 0.2 < made.session(0).mean() < 0.8
    assert made.manifest["model"]["activation"] == "relu2"
    assert 0.2 < activity(calibrate(folder, texts, tmp_path / "c", CALIBRATE))[0].density < 0.8
    checkpoint = open_checkpoint(folder)
    FORMATS["zigzag-q4_k"].check_model(checkpoint)
    with pytest.raises(PackingError, match="activation 'relu2' with a gate: no engine") as caught:
        FORMATS["neuron-q4_k"].check_model(checkpoint)
    assert "\n" not in str(caught.value)
