"""Gemma 4: what layers without a window have of their own, and which models are measured or refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import VOCABULARY, make_model
from passes import by_a_stream, by_the_stock_model
from transformers import AutoModelForCausalLM

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import Attention
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.model import load_model
from sparsepack.runtime.reference.products import route

MIXTURE = "gemma4_text, mixture"
IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", "gemma4_text"))


def test_layers_without_a_window_have_heads_of_their_own(checkpoint: Checkpoint) -> None:
    mixers = [block.mixer for block in checkpoint.architecture.blocks]
    assert [(m.kv_heads, m.head_dim, m.k_eq_v) for m in mixers if isinstance(m, Attention)] == [
        (2, 48, False),
        (2, 48, False),
        (1, 96, True),
    ]
    assert all(block.scaled for block in checkpoint.architecture.blocks)
    assert [len(checkpoint.projections(layer, "attn_in")) for layer in range(3)] == [3, 3, 2]


def test_its_numbers_come_back_from_a_file(checkpoint: Checkpoint) -> None:
    architecture = checkpoint.architecture
    check_numbers(architecture)
    assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize(
    "changes",
    [{"global_heads": (3, 96)}, {"global_heads": (1, 90)}, {"global_heads": (1,)}, {"k_eq_v": 1}],
    ids=["heads that do not divide", "too few channels", "one number", "no boolean"],
)
def test_numbers_of_no_model_are_refused(checkpoint: Checkpoint, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads|k_eq_v"):
        check_numbers(dataclasses.replace(checkpoint.architecture, **changes))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixture") / "m", MIXTURE)


def test_a_mixture_reads_the_stream_by_one_norm_and_is_the_stock_model(mixture: Path) -> None:
    checkpoint, stock = open_checkpoint(mixture), AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    numbers = checkpoint.architecture.experts
    assert numbers is not None
    assert (numbers.count, numbers.used, numbers.shared, numbers.normalised) == (6, 2, 2, True)
    first, second = (f"model.layers.1.pre_feedforward_layernorm{end}.weight" for end in ("", "_2"))
    assert torch.equal(checkpoint.tensor(first), checkpoint.tensor(second))
    with torch.inference_mode():
        assert torch.allclose(load_model(checkpoint)(IDS).logits, stock(IDS).logits, rtol=0, atol=1e-4)


def test_a_router_multiplies_what_experts_read(mixture: Path) -> None:
    checkpoint, stock = open_checkpoint(mixture), AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    block, x = stock.model.layers[1], torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        probabilities, weights, chosen = block.router(x)
        read = block.pre_feedforward_layernorm_2(x)
    router = checkpoint.tensor("model.layers.1.router.proj.weight")
    assert torch.allclose((read @ router.T).softmax(-1), probabilities, atol=1e-5)
    scale = checkpoint.tensor("model.layers.1.router.per_expert_scale").float()
    mine = route(read, router, 2, True, scale=scale)
    assert torch.equal(mine[0], chosen)
    assert torch.allclose(mine[1], weights, atol=1e-5)


def test_a_norm_with_zeros_loses_nothing(mixture: Path, tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    with torch.no_grad():
        stock.model.layers[0].pre_feedforward_layernorm_2.weight[[3, 77]] = 0
    stock.save_pretrained(tmp_path / "m")
    for text in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / text).write_text((mixture / text).read_text())
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensor("model.layers.0.pre_feedforward_layernorm_2.weight")[77] == 1
    assert not checkpoint.experts(0, "mlp_in")[:6, :, [3, 77]].any()
    assert checkpoint.experts(0, "mlp_in")[6:, :, [3, 77]].all()
    assert torch.equal(torch.stack([*checkpoint.each_expert(0, "mlp_in")]), checkpoint.experts(0, "mlp_in"))
    with torch.inference_mode():
        assert torch.allclose(load_model(checkpoint)(IDS).logits, stock(IDS).logits, rtol=0, atol=1e-4)


def test_a_dense_mlp_that_is_no_number_of_experts_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", MIXTURE, moe_intermediate_size=192)
    with pytest.raises(CheckpointError, match="intermediate_size is 512, which is no multiple of the 192"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512},
        {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_double_wide_mlp": True,
        },
    ],
    ids=["embeddings of each layer", "shared keys and values, too"],
)
def test_what_blocks_are_given_beside_hidden_states_travels_with_these(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "gemma4_text", **changes))
    assert "measured, not run by our engines" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"whose hidden_size_per_layer_input is not 0 or whose num_kv_shared_"):
        check_taken("pack", checkpoint.family, "m")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    expected, last = by_the_stock_model(stock, stock.model.layers, IDS)
    stream = open_blocks(checkpoint)
    found, _ = by_a_stream(stream, checkpoint.layers, IDS, watched=False)
    hidden = [states[..., : checkpoint.config.hidden_size] for states in found]
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(hidden, expected, strict=True))
    assert torch.allclose(stream.finish(found[-1]), last, rtol=1e-4, atol=1e-4)
    part = by_a_stream(open_blocks(checkpoint), checkpoint.layers, IDS[1:], watched=False)[0]
    assert torch.allclose(part[-1], found[-1][1:], rtol=1e-4, atol=1e-4)
