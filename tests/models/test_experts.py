"""Mixtures of experts: read under the stock model's names, computed as it computes them, watched inside."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import EXPERTS, VOCABULARY, edit_config, make_model, row
from passes import by_a_stream, by_the_stock_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from sparsepack.errors import CheckpointError, RotationError, UserError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.delta_net import grouped_source
from sparsepack.models.checkpoint.experts import PARTS, apart_source, fused_tensor, part_shapes, part_tensor
from sparsepack.models.families import REFUSED, family_of
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import routing_hooks, site_hooks
from sparsepack.models.hf_model.model import load_model

IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_model(tmp_path_factory.mktemp("experts") / "m", family) for family in EXPERTS}


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(folders["qwen3_moe"], tmp_path / "model")


@cache
def stock_model(folder: Path) -> Any:
    attention = family_of(json.loads((folder / "config.json").read_text())["model_type"], "").attention
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    ).eval()


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", [name for name in EXPERTS if row(name).experts.stored and name != "gpt_oss"])
def test_a_checkpoint_of_single_experts_is_the_stock_model(folders: dict[str, Path], family: str) -> None:
    names = load_file(folders[family] / FILE)
    assert any(".experts.7." in name for name in names)  # what is tested: they are stored one by one
    checkpoint, stock = open_checkpoint(folders[family]), stock_model(folders[family])
    stored = grouped_source(checkpoint.source, checkpoint.family, checkpoint.config)
    for name, parameter in stock.named_parameters():
        assert torch.equal(stored.tensor(name).float(), parameter), name
    mine = load_model(checkpoint)
    with torch.inference_mode():
        expected = stock(IDS).logits
        assert torch.allclose(mine(IDS).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    numbers = checkpoint.architecture.experts
    assert numbers is not None
    two = dict.fromkeys(("qwen2_moe", "deepseek_v2", "nemotron_h"), 2)
    one = dict.fromkeys(("qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe_lite"), 1)
    shared = (one | two).get(family, 0)
    assert (numbers.count, numbers.used, numbers.shared) == (8, 2, shared)
    assert numbers.normalised == (family not in ("olmoe", "qwen2_moe", "deepseek_v2"))
    layer = next(n for n in range(checkpoint.layers) if checkpoint.family.experts_of(n) is not None)
    for site, rows in (("mlp_in", 256 * (1 + checkpoint.family.gated)), ("mlp_mid", 256)):
        assert checkpoint.stacked_shape(site, layer) == ((8 + shared) * rows, 256)
        assert tuple(checkpoint.experts(layer, site).shape) == (8 + shared, rows, 256)
        assert torch.equal(checkpoint.experts(layer, site).flatten(0, 1), checkpoint.stacked(layer, site)[0])
        assert torch.equal(torch.stack([*checkpoint.each_expert(layer, site)]), checkpoint.experts(layer, site))
    assert checkpoint.token_weights("mlp_mid", layer) == (2 + shared) * 256 * 256
    assert checkpoint.token_weights("attn_out") == checkpoint.stacked(0, "attn_out")[0].numel()


def test_packing_never_has_all_experts_of_a_block_at_once(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsepack.models.checkpoint.sources import MadeSource
    from sparsepack.packing import PackRequest, pack

    whole, asked = MadeSource.tensor, list[str]()

    def tensor(source: MadeSource, name: str) -> torch.Tensor:
        asked.append(name)
        return whole(source, name)

    monkeypatch.setattr(MadeSource, "tensor", tensor)
    pack(PackRequest(str(folders["qwen3_moe"]), tmp_path / "m.gguf"))
    assert any("gate.weight" in name for name in asked)  # what is tested: the router is read through it
    assert not any(".mlp.experts." in name for name in asked)


@pytest.mark.parametrize("family", EXPERTS)
def test_blocks_one_by_one_are_those_of_the_stock_model(folders: dict[str, Path], family: str) -> None:
    stock = stock_model(folders[family])
    expected, last = by_the_stock_model(stock, stock.model.layers, IDS)
    stream = BlockStream(open_checkpoint(folders[family]))
    found, _ = by_a_stream(stream, stream.source.layers, IDS, watched=True)
    experts = row(family).experts
    close = 1e-4 if experts is not None and experts.own_norms is not None else 1e-5  # matrices that norms are in
    assert all(torch.allclose(*pair, atol=close) for pair in zip(found, expected, strict=True))
    assert torch.allclose(stream.finish(found[-1]), last, atol=close)


def test_gpt_oss_is_the_stock_model_with_rows_of_gate_and_up_apart(folders: dict[str, Path]) -> None:
    checkpoint, stock = open_checkpoint(folders["gpt_oss"]), stock_model(folders["gpt_oss"])
    experts = dict(stock.model.layers[1].mlp.experts.named_parameters())
    apart = {name: torch.cat([experts[name][..., ::2], experts[name][..., 1::2]], -1) for name in experts}
    for name, value in experts.items():
        expected = apart[name] if name.startswith("gate_up") else value
        found = checkpoint.tensor(f"model.layers.1.mlp.experts.{name}").float()
        assert torch.equal(found, expected if name.endswith("_bias") else expected.mT), name
    with torch.inference_mode():
        expected = stock(IDS).logits
        assert torch.allclose(load_model(checkpoint)(IDS).logits, expected, rtol=0, atol=1e-5)
    bias = checkpoint.stacked_bias(1, "mlp_in")
    assert bias is not None
    assert torch.equal(bias.float(), apart["gate_up_proj_bias"])
    back = apart_source(checkpoint.source, checkpoint.family)
    for name, value in load_file(folders["gpt_oss"] / FILE).items():
        assert back.shapes[name] == value.shape
        assert torch.equal(back.tensor(name), value), name


def test_a_gpt_oss_that_clamps_otherwise_is_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["gpt_oss"], tmp_path / "m")
    edit_config(folder, swiglu_limit=9.0)
    assert "swiglu_limit is 9.0; expected 7.0" in refused(folder)


@pytest.mark.parametrize("form", ["fused", "parts"])
def test_experts_that_are_stored_together_are_the_same_model(folders: dict[str, Path], copied: Path, form: str) -> None:
    expected, tensors = open_checkpoint(folders["qwen3_moe"]), load_file(copied / FILE)
    shapes = expected.source.shapes
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name in part_shapes(expected.family, shapes) if form == "parts" else (n for n in shapes if ".experts." in n):
        kept[name] = part_tensor(expected.family, name, expected.tensor).contiguous()
    save_file(kept, copied / FILE, {"format": "pt"})
    found = open_checkpoint(copied)
    assert dict(found.source.shapes) == dict(shapes)
    for name in shapes:
        assert torch.equal(found.tensor(name), expected.tensor(name)), name


def test_parts_make_up_the_whole_and_other_tensors_are_left_alone(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["mixtral"])
    family = checkpoint.family
    parts = part_shapes(family, checkpoint.source.shapes)
    assert len(parts) == 2 * len(PARTS)
    assert set(parts.values()) == {(8, 256, 256)}
    for name in checkpoint.source.shapes:
        made = fused_tensor(family, name, lambda part: part_tensor(family, part, checkpoint.tensor))
        assert torch.equal(made, checkpoint.tensor(name)), name


def test_what_is_watched_inside_is_what_the_experts_compute_and_may_be_changed(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["qwen3_moe"])
    stream = BlockStream(checkpoint)
    stream.load(0)
    seen: dict[str, torch.Tensor] = {}
    chosen: list[torch.Tensor] = []
    hidden = stream.embed(IDS)
    with torch.inference_mode():
        plain = stream(hidden)
        with (
            site_hooks([(0, stream.block)], checkpoint.family, lambda _, site, x: seen.__setitem__(site, x.clone())),
            routing_hooks(stream.block, checkpoint.family, lambda each: chosen.append(each.clone())),
        ):
            assert torch.allclose(stream(hidden), plain, atol=1e-6)
        assert list(seen) == list(SITES)
        (experts,) = chosen
        assert experts.shape == (2, 33, 2)
        assert seen["mlp_mid"].shape == (2, 33, 2, 256)
        for row, position, slot in ((0, 0, 0), (1, 32, 1)):
            expert = int(experts[row, position, slot])
            weight = checkpoint.tensor("model.layers.0.mlp.experts.gate_up_proj")[expert].float()
            gate, up = (weight @ seen["mlp_in"][row, position]).chunk(2)
            assert torch.allclose(functional.silu(gate) * up, seen["mlp_mid"][row, position, slot], atol=1e-5)

        def nothing(_: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            return torch.zeros_like(x) if site == "mlp_mid" else None

        with site_hooks([(0, stream.block)], checkpoint.family, nothing):
            assert not torch.allclose(stream(hidden), plain, atol=1e-2)
        assert torch.allclose(stream(hidden), plain, atol=1e-6)  # who has watched has gone


def test_a_shared_expert_is_watched_as_experts_of_the_common_width(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["qwen2_moe"])
    into, mid = checkpoint.experts(1, "mlp_in").float(), checkpoint.experts(1, "mlp_mid").float()
    stream = BlockStream(checkpoint)
    hidden = stream.embed(IDS)
    stream.load(1)
    seen: list[tuple[str, torch.Tensor]] = []
    with torch.inference_mode():
        plain = stream(hidden)
        for halved in (False, True):

            def watch(_: int, site: str, x: torch.Tensor, halved: bool = halved) -> torch.Tensor | None:
                seen.append((site, x.clone()))
                return x / 2 if halved and site == "mlp_mid" else None

            before = len(seen)
            with site_hooks([(1, stream.block)], checkpoint.family, watch):
                found = stream(hidden)
            assert [site for site, _ in seen[before:]] == [*SITES]  # each once
            assert torch.allclose(found, plain, atol=1e-5) == (not halved)
        x, middle = seen[2][1], seen[3][1]
        assert middle.shape == (2, 33, 2 + 2, 256)
        outputs = []
        for part in (0, 1):
            gate, up = (x @ into[8 + part].T).chunk(2, -1)
            assert torch.allclose(functional.silu(gate) * up, middle[:, :, 2 + part], atol=1e-5)
            outputs.append(middle[:, :, 2 + part] @ mid[8 + part].T)
        expected = stream.block.mlp.shared_expert(x)
        assert torch.allclose(sum(outputs), expected, atol=1e-4)
        assert torch.equal(stream(hidden), plain)  # who has watched has gone


@pytest.mark.parametrize(
    ("family", "values", "told"),
    [
        ("qwen2_moe", {"shared_expert_intermediate_size": 300}, "is 300, which is no multiple of the 256"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "is 0, experts are 256 wide"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 768}, "weights and config.json do not belong together"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0: queries, keys and values are clipped, which no engine does"),
    ],
)
def test_what_no_engine_has_a_place_for_in_these_families_is_one_line(
    folders: dict[str, Path], tmp_path: Path, family: str, values: dict[str, Any], told: str
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / "model")
    edit_config(folder, **values)
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(folder).architecture
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("lost", "up_proj.weight of expert 5 is missing, its configuration means 8 experts"),
        ("more", "is one too many, its configuration means 8 experts"),
        ("narrow", "expected all experts of a block alike"),
        ("float", "expected all experts of a block alike"),
    ],
)
def test_experts_that_are_not_those_of_the_configuration_are_one_line(copied: Path, change: str, told: str) -> None:
    tensors = load_file(copied / FILE)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    if change == "lost":
        del tensors[name]
    elif change == "more":
        tensors[name.replace(".5.", ".8.")] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:-1] if change == "narrow" else tensors[name].float()
    save_file(tensors, copied / FILE, {"format": "pt"})
    assert told in refused(copied)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected a whole number from 1 to 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; expected a whole number from 1 to 8"),
        ({"mlp_only_layers": [1]}, "some blocks have a dense MLP in place of experts"),
        ({"decoder_sparse_step": 2}, "some blocks have a dense MLP in place of experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; expected a whole number"),
        ({"moe_intermediate_size": 128}, "weights and config.json do not belong together"),
        ({"scoring_func": "sigmoid"}, "scoring_func sigmoid: a router of another kind; expected the softmax"),
        ({"n_group": 4, "topk_group": 2}, "n_group 4: a router of another kind"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5: a router of another kind"),
    ],
)
def test_numbers_that_no_engine_runs_are_one_line(copied: Path, values: dict[str, Any], told: str) -> None:
    edit_config(copied, **values)
    assert told in refused(copied)


@pytest.mark.parametrize("model_type", REFUSED)
def test_known_types_that_are_not_supported_are_refused_by_what_they_have(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"{model_type} models are not supported: ") as caught:
        family_of(model_type, "m")
    assert REFUSED[model_type] in str(caught.value)


def test_verbs_that_do_not_take_experts_say_so(folders: dict[str, Path]) -> None:
    from sparsepack.calibrate.bases import ROTATIONS
    from sparsepack.calibrate.distillation import check_model
    from sparsepack.calibrate.refit import RefitOptions
    from sparsepack.calibrate.refitting import predicted_refit
    from sparsepack.formats.table import FORMATS

    checkpoint = open_checkpoint(folders["mixtral"])
    told = "does not take mixtral models yet, whose MLPs are mixtures of experts"
    calls = {
        "distil": lambda: check_model(checkpoint),
        "fitting": lambda: predicted_refit(checkpoint, FORMATS["zigzag-q4_k"], RefitOptions(refit=True)),
    }
    for what, call in calls.items():
        with pytest.raises(CheckpointError, match=told):
            call()
        assert what
    with pytest.raises(RotationError, match="a basis is not learnt for mixtures of experts; take the basis pca"):
        ROTATIONS["learnt"].check_model(checkpoint)
    for name, format in FORMATS.items():
        if format.experts:
            format.check_model(checkpoint)
        else:
            with pytest.raises(UserError, match=f"mixtures of experts, for which {name} has no place"):
                format.check_model(checkpoint)
