"""Pruning mixtures of experts: every expert by itself, written as most checkpoints have them."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import EXPERTS, TEXT, make_model, row
from pairwise import each_value
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import load
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.errors import PruningError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.delta_net import grouped_source
from sparsepack.models.checkpoint.experts import apart_source
from sparsepack.models.pattern import Pattern, kept

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return {family: make_model(folder / family, family, num_hidden_layers=1) for family in EXPERTS}


@pytest.fixture(scope="module")
def calibrations(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, options = tmp_path_factory.mktemp("calibrations"), CalibrateOptions(context=48, samples=4, batch=2)

    @cache
    def of(family: str) -> Path:
        calibrate(models[family], Text("t", (TEXT[:3000],), "t"), folder / family, options)
        return folder / family

    return of


def most_in_a_group(weight: torch.Tensor, of: int) -> int:
    return int((weight.view(len(weight), -1, of) != 0).sum(-1).max())


@each_value({"family": EXPERTS, "keep, of, method": [(6, 8, "magnitude"), (2, 4, "sparsegpt")]})
def test_every_expert_keeps_the_pattern_and_transformers_loads_it(
    models: dict[str, Path], calibrations: Any, tmp_path: Path, family: str, keep: int, of: int, method: str
) -> None:
    options = PruneOptions(keep=keep, of=of, method=method, batch=2)
    made = prune(models[family], tmp_path / "p", options, None if method == "magnitude" else calibrations(family))
    experts, checkpoint = row(family).experts, open_checkpoint(models[family])
    assert experts is not None
    before, after = load_file(models[family] / FILE), load_file(tmp_path / "p" / FILE)
    before = {re.sub(r"^backbone\.", "model.", name): weight for name, weight in before.items()}  # Nemotron's old names
    if experts.own_norms is not None:  # which are folded
        before = {name: checkpoint.tensor(name) for name in checkpoint.source.shapes}
    assert {name: (x.dtype, x.shape) for name, x in before.items()} == {
        name: (x.dtype, x.shape) for name, x in after.items()
    }
    matrices, fused = 0, experts.alternate
    attention = {
        name
        for site in checkpoint.family_at(0).projections
        if site[:4] == "attn"
        for name in checkpoint.weight_names(0, site)
    }
    grouped = family == "qwen3_next"  # two of its matrices are one in a checkpoint
    joined = {re.sub(r"_(qkv|z)\.weight", "_qkvz.weight", name) if grouped else name for name in attention}
    for name, weight in after.items():
        of_shared = experts.shared is not None and f".{experts.shared.module}." in name
        of_mlp = ".experts." in name or (of_shared and not name.endswith("gate.weight"))
        if (of_mlp or name in joined) and not name.endswith("bias"):
            rows = weight.mT.contiguous() if fused and ".experts." in name else weight
            assert most_in_a_group(rows, of) == keep, name
            if experts.gated or method == "magnitude":  # neurons of squared ReLU that never were active lose all
                assert int((weight != 0).sum()) == pytest.approx(weight.numel() * keep / of, rel=1e-3)
            matrices += 1
        else:
            assert torch.equal(weight, before[name]), name
    parts = 2 + experts.gated
    shared = parts * (experts.shared is not None)
    assert matrices == len(joined) + (parts * 8 if experts.stored and not fused else 2) + shared
    assert len(made.matrices) == len(attention) + 2 + shared
    assert all(0 < row.error < 0.9 for row in made.matrices)
    if experts.gated or method == "magnitude":
        assert all(row.density == pytest.approx(keep / of, rel=1e-3) for row in made.matrices)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32)
    checkpoint = open_checkpoint(tmp_path / "p")
    stored = apart_source(checkpoint.source, checkpoint.family) if fused else checkpoint.source
    stored = grouped_source(stored, checkpoint.family, checkpoint.config)
    for name, parameter in stock.named_parameters():
        assert torch.equal((stored if name in stored.shapes else checkpoint).tensor(name).float(), parameter), name


def test_down_matrices_are_weighed_by_what_enters_their_own_expert(
    models: dict[str, Path], calibrations: Any, tmp_path: Path
) -> None:
    family, pattern = "qwen2_moe", Pattern(2, 4)
    options = PruneOptions(keep=2, of=4, method="wanda", include=("blk.0.mlp_*",), batch=2, dtype="float32")
    prune(models[family], tmp_path / "p", options, calibrations(family))
    stock = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
    mlp, seen = stock.model.layers[0].mlp, {}
    mlp.register_forward_pre_hook(lambda _, inputs: seen.__setitem__("x", inputs[0].flatten(0, 1)))
    mlp.gate.register_forward_hook(lambda _, __, output: seen.__setitem__("chosen", output[2]))
    mlp.shared_expert.down_proj.register_forward_pre_hook(lambda _, inputs: seen.__setitem__("shared", inputs[0]))
    with torch.inference_mode():
        stock(load(calibrations(family)).windows.long())
    x, chosen, after = seen["x"], seen["chosen"], load_file(tmp_path / "p" / FILE)
    experts, prefix = mlp.experts, "model.layers.0.mlp."

    def agrees(name: str, weight: torch.Tensor, inputs: torch.Tensor) -> bool:
        expected = kept(weight.square() * inputs.square().mean(0), pattern)
        same = (after[prefix + name] != 0) == expected
        return float(same.float().mean()) > 0.999  # but for ties in bfloat16

    for expert in range(8):
        tokens = x[(chosen == expert).any(-1)]
        gate, up = (tokens @ experts.gate_up_proj[expert].T).chunk(2, -1)
        middle = torch.nn.functional.silu(gate) * up
        assert agrees(f"experts.{expert}.down_proj.weight", experts.down_proj[expert].detach(), middle.detach())
        assert agrees(f"experts.{expert}.up_proj.weight", experts.gate_up_proj[expert, 256:].detach(), x)
    assert agrees("shared_expert.down_proj.weight", mlp.shared_expert.down_proj.weight.detach(), seen["shared"])


def test_an_expert_that_no_token_reached_is_named_and_pruned_by_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    tensors = load_file(folder / FILE)
    router = tensors["model.layers.0.mlp.gate.weight"]
    router[1], router[3] = -router[0], -router[2]
    router[5] = 0  # of each pair one logit is above its own
    save_file(tensors, folder / FILE, {"format": "pt"})
    calibrate(folder, Text("t", (TEXT[:3000],), "t"), tmp_path / "c", CalibrateOptions(context=32, samples=2))
    options = PruneOptions(keep=2, of=4, method="sparsegpt", include=("blk.0.mlp_mid",))
    capfd.readouterr()
    prune(folder, tmp_path / "p", options, tmp_path / "c")
    told = capfd.readouterr().err
    name = "model.layers.0.mlp.experts.5.down_proj.weight"
    weight, left = tensors[name].float(), load_file(tmp_path / "p" / FILE)[name].float()
    assert "no token reached 1 of its experts (5); what stays of their down matrices is chosen by size" in told
    assert torch.equal(left, torch.where(kept(weight.square(), Pattern(2, 4)), weight, 0))


def test_another_order_of_neurons_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PruningError, match=r"permute: .*mixtral has experts, whose neurons are not put into another"):
        prune(models["mixtral"], tmp_path / "p", PruneOptions(keep=2, of=4, method="magnitude", permute=True))
