"""Checkpoints whose residual stream changes its basis: the same model as before, for sparsepack alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models_for_tests import ROTATED, WINDOWED, edit_config, make_model
from passes import by_a_stream
from safetensors.torch import load_file, save_file
from segments_for_tests import segmented
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.writer import config_json, texts_of
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model

IDS = torch.randint(500, (2, 24), generator=torch.Generator().manual_seed(0))
EXACT = 1e-5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A model and the same in segments of one, two and one blocks."""
    folder = tmp_path_factory.mktemp("segments")
    model = make_model(folder / "m", num_hidden_layers=4, attention_bias=True, mlp_bias=True)
    return open_checkpoint(model), segmented(model, (1, 3), folder / "s")


@pytest.fixture
def copied(llama: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> Path:
    """A copy of the model in segments that a test may damage."""
    return shutil.copytree(llama[1].path, tmp_path / "model")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "starts"), [*((family, (1, 3)) for family in ROTATED), ("llama", (0, 1, 2, 3)), ("qwen3", (0,))]
)
def test_the_whole_model_and_a_stream_are_the_model_from_before(
    tmp_path: Path, family: str, starts: tuple[int, ...]
) -> None:
    model = make_model(tmp_path / "m", family, **WINDOWED[family] | {"num_hidden_layers": 4})
    plain, changed = open_checkpoint(model), segmented(model, starts, tmp_path / "s")
    assert changed.bases == starts
    assert plain.bases == ()
    with torch.inference_mode():
        expected = load_model(plain)(IDS).logits
        assert relative(load_model(changed)(IDS).logits, expected) < EXACT
        stream = BlockStream(changed)
        hidden, _ = by_a_stream(stream, 4, IDS, watched=False)
        assert relative(stream.finish(hidden[-1]) @ stream.head().t(), expected) < EXACT


def test_a_block_can_be_run_several_times_and_is_watched_in_the_basis_that_it_has(
    llama: tuple[Checkpoint, Checkpoint],
) -> None:
    """Inputs of o and down do not know in which basis the residual stream is written; those of the others do."""
    seen: list[dict[tuple[int, str], torch.Tensor]] = []
    for checkpoint in llama:
        stream, inputs = BlockStream(checkpoint), {}
        hidden = stream.embed(IDS)
        for layer in range(4):
            stream.load(layer)

            def keep(layer: int, site: str, x: torch.Tensor, into: dict = inputs) -> None:
                into[layer, site] = x.clone()

            with torch.inference_mode(), site_hooks([(layer, stream.block)], checkpoint.family, keep):
                once = stream(hidden)
                stream.pass_on(hidden, 1, lambda: None)
            assert torch.allclose(once, hidden, atol=1e-5)
        seen.append(inputs)
    for layer in range(4):
        for site in SITES:
            same = relative(seen[1][layer, site], seen[0][layer, site]) < EXACT
            assert same == (site in ("attn_out", "mlp_mid")), (layer, site)


def test_it_runs_in_the_precision_asked_for(llama: tuple[Checkpoint, Checkpoint]) -> None:
    model = load_model(llama[1], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        assert relative(model(IDS).logits.float(), load_model(llama[0])(IDS).logits) < 0.2


def test_stock_transformers_refuses_the_folder_whatever_class_is_told_to_load_it(
    llama: tuple[Checkpoint, Checkpoint],
) -> None:
    folder = llama[1].path
    with pytest.raises(ValueError, match="model type `sparsepack-segments` but Transformers does not recognize"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises((ValueError, RuntimeError, ArithmeticError)):
        LlamaForCausalLM.from_pretrained(folder)


def test_texts_are_those_of_the_same_folder_and_of_the_stock_model(llama: tuple[Checkpoint, Checkpoint]) -> None:
    plain, changed = llama
    written = json.loads(texts_of(changed)["config.json"])
    assert written == json.loads((changed.path / "config.json").read_text())
    assert written["residual_basis"] == [1, 3]
    stock = json.loads(config_json(changed))
    assert stock == json.loads(config_json(plain)) | {"dtype": "float32"}
    assert changed.tokenizer("The class")["input_ids"] == plain.tokenizer("The class")["input_ids"]


DAMAGED = {
    "a basis that is missing": (
        lambda tensors: tensors.pop("model.layers.3.residual_basis.weight"),
        "the tensor model.layers.3.residual_basis.weight is missing",
    ),
    "a basis too many": (
        lambda tensors: tensors.update({"model.layers.2.residual_basis.weight": torch.eye(256)}),
        "the tensor model.layers.2.residual_basis.weight is not understood",
    ),
    "a basis of another width": (
        lambda tensors: tensors.update({"model.layers.1.residual_basis.weight": torch.eye(255)}),
        r"model.layers.1.residual_basis.weight is [255, 255], its configuration means [256, 256]",
    ),
    "a norm that is missing": (
        lambda tensors: tensors.pop("model.norm.weight"),
        "the tensor model.norm.weight is missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_bases_are_those_of_the_configuration(copied: Path, case: str) -> None:
    change, said = DAMAGED[case]
    tensors = load_file(copied / "model.safetensors")
    change(tensors)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert said in refused(copied)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residual_basis": [1, 4]}, "[1, 4] are not numbers of 4 blocks"),
        ({"residual_basis": [3, 1]}, "[3, 1] are not numbers of 4 blocks"),
        ({"residual_basis": [1, 1]}, "are not numbers of 4 blocks"),
        ({"residual_basis": []}, "residual_basis"),
        ({"residual_basis": ["1"]}, "residual_basis"),
        ({"residual_basis": [-1]}, "residual_basis"),
        ({"config": 3}, "config"),
        ({"config": {}}, "not numbers of None blocks"),
        ({"config": {"num_hidden_layers": 4}}, "is not understood in a llama model of this conf"),
        ({"family": "bloom"}, "model type 'bloom' is not supported"),
        ({"family": ["llama"]}, "family"),
        ({"model_type": "llama"}, ""),
    ],
)
def test_a_configuration_that_is_not_understood_is_one_line(copied: Path, changes: dict, said: str) -> None:
    edit_config(copied, **changes)
    assert said in refused(copied)


def test_a_stock_configuration_does_not_hide_bases(copied: Path) -> None:
    (copied / "config.json").write_text(config_json(open_checkpoint(copied)))
    assert "the tensor model.layers.1.residual_basis.weight is not understood in a llama model" in refused(copied)
