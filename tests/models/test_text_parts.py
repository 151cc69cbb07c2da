"""Models that take images, too: their text part is read, where transformers has it as a model of its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import write_zigzag
from models_for_tests import EXPERTS, SMALL, VOCABULARY, edit_config, tokenizer
from safetensors.torch import load_file, save_file

from sparsepack.errors import CheckpointError
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import TEXT_PARTS
from sparsepack.models.hf_model.model import load_model

IDS = torch.randint(5, VOCABULARY - 5, (2, 33), generator=torch.Generator().manual_seed(1))
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4_unified": ("gemma4_unified_text", {}),
    "mistral3": ("mistral", {"model_type": "pixtral", "head_dim": 16}),
    "internvl": ("qwen3", {"model_type": "internvl_vision"}),
    "llava": ("llama", {"model_type": "clip_vision_model", "projection_dim": 32}),
    "llava_next": ("mistral", {"model_type": "clip_vision_model", "projection_dim": 32}),
    "llava_onevision": ("qwen2", {"model_type": "siglip_vision_model"}),
    "idefics3": ("llama", {}),
    "smolvlm": ("llama", {}),
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
}
"""The family of the text, and what the part for images has of its own."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models, as transformers saves them."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    made = {}
    for model_type, (family, images) in PARTS.items():
        text = {
            **TEXT,
            **(SMALL | EXPERTS)[family],
            "model_type": family,
            "num_hidden_layers": {"qwen3_5": 4, "gemma4": 3}.get(model_type[:7].rstrip("_"), 2),
            "tie_word_embeddings": False,
        }
        told = {"image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1, "mm_tokens_per_image": 4}
        config = AutoConfig.for_model(model_type, text_config=text, vision_config={**IMAGES, **images}, **told)
        torch.manual_seed(1)
        made[model_type] = tmp_path_factory.mktemp(model_type) / "m"
        AutoModelForImageTextToText.from_config(config).save_pretrained(made[model_type])
        tokenizer().save_pretrained(made[model_type])
    return made


def check(checkpoint: Checkpoint, folder: Path) -> None:
    """The text part's logits are those of the whole model, to which no image is shown."""
    from transformers import AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found, expected = load_model(checkpoint)(IDS).logits, whole(IDS).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_each_row_is_tried() -> None:
    assert PARTS.keys() == TEXT_PARTS.keys()


@pytest.mark.parametrize("model_type", PARTS)
def test_the_text_part_computes_what_the_whole_model_does_with_texts(
    folders: dict[str, Path], model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(folders[model_type])
    assert f"the text part of a {model_type} model alone is read" in capsys.readouterr().err
    assert checkpoint.family.model_type == PARTS[model_type][0]
    check(checkpoint, folders[model_type])


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "llava"])
def test_it_is_packed_as_the_text_model_that_it_is(folders: dict[str, Path], model_type: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders[model_type])
    write_zigzag(checkpoint, {}, tmp_path / "z.gguf")
    assert read_packed(tmp_path / "z.gguf").architecture.model_type == PARTS[model_type][0]
    report = verify(tmp_path / "z.gguf", checkpoint)
    assert report.passed, report.problems
    assert open_artifact(tmp_path / "z.gguf").stock().config.num_hidden_layers == checkpoint.layers


@pytest.mark.parametrize("model_type", ["mistral3", "llava", "idefics3"])
def test_names_as_in_the_whole_model_mean_the_same(folders: dict[str, Path], model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    folder = shutil.copytree(folders[model_type], tmp_path / "m")
    (file,) = folder.glob("*.safetensors")
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    save_file({name: weight.detach().contiguous() for name, weight in whole.named_parameters()}, file)
    check(open_checkpoint(folder), folders[model_type])


def test_an_output_matrix_that_only_one_of_two_configurations_ties_is_there_or_not(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Mistral's own files have one, though the whole model's configuration says by default that they do not."""
    folder = shutil.copytree(folders["mistral3"], tmp_path / "m")
    assert open_checkpoint(folder).tied
    (file,) = folder.glob("*.safetensors")
    head = torch.randn(VOCABULARY, TEXT["hidden_size"])
    save_file(load_file(file) | {"language_model.lm_head.weight": head}, file)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.tied
    torch.testing.assert_close(load_model(checkpoint).lm_head.weight, head)


def test_a_tensor_of_another_part_is_not_lost_silently(folders: dict[str, Path], tmp_path: Path) -> None:
    changed = shutil.copytree(folders["gemma3"], tmp_path / "m")
    (file,) = changed.glob("*.safetensors")
    save_file(load_file(file) | {"model.audio_tower.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"the tensor model\.audio_tower\.weight is not understood"):
        open_checkpoint(changed)


def test_a_text_part_of_an_unknown_family_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = shutil.copytree(folders["llava"], tmp_path / "m")
    edit_config(folder, text_config=AutoConfig.for_model("starcoder2").to_dict())
    with pytest.raises(
        CheckpointError, match="the text part of a llava model: model type 'starcoder2' is not supported"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "phi4_multimodal", "mllama", "gemma3n"])
def test_others_are_refused_by_what_they_have(folders: dict[str, Path], model_type: str, tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llava"], tmp_path / "m")
    edit_config(folder, model_type=model_type)
    with pytest.raises(CheckpointError, match=f"{model_type} models are not supported: its|some"):
        open_checkpoint(folder)
