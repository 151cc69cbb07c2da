"""The numbers that an engine takes from a configuration are those of the stock model."""

import json

import pytest
import torch
from model_variants import FOLDERS
from transformers import AutoConfig, AutoModel

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.configuration import folder_config
from sparsepack.models.hf_config import architecture_of

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROTARY = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
}


def config(**changes):
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    return AutoConfig.for_model(changes.pop("model_type", "llama"), **{**values, "intermediate_size": 96, **changes})


@pytest.mark.parametrize("kind", ROTARY)
def test_frequencies_turn_positions_as_the_stock_model_does(kind):
    stock = config(rope_parameters=ROTARY[kind], max_position_embeddings=512)
    architecture = architecture_of(stock, None)
    rotary = type(AutoModel.from_config(stock).rotary_emb)(stock)
    cos, sin = rotary(torch.zeros(1), torch.arange(300)[None])
    angles = torch.outer(torch.arange(300.0), torch.tensor(architecture.inv_freq))
    torch.testing.assert_close(angles.cos().repeat(1, 2) * architecture.rotary_scale, cos[0])
    torch.testing.assert_close(angles.sin().repeat(1, 2) * architecture.rotary_scale, sin[0])
    if kind == "yarn":
        assert architecture.rotary_scale > 1


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [1.0 + n for n in range(8)],
    "original_max_position_embeddings": 64,
}
BY_LENGTH = {
    "longrope": LONGROPE,
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("length", [64, 65, 200])
def test_frequencies_follow_the_texts_length_as_in_the_stock_model(kind, length):
    stock = config(rope_parameters=BY_LENGTH[kind], max_position_embeddings=64 if kind == "dynamic" else 256)
    architecture = architecture_of(stock, None)
    assert architecture.context == 256
    cos, sin = type(AutoModel.from_config(stock).rotary_emb)(stock)(torch.zeros(1), torch.arange(length)[None])
    angles = torch.outer(torch.arange(float(length)), architecture.frequencies(length))
    torch.testing.assert_close(angles.cos().repeat(1, 2) * architecture.rotary_scale, cos[0])
    torch.testing.assert_close(angles.sin().repeat(1, 2) * architecture.rotary_scale, sin[0])
    assert torch.equal(architecture.frequencies(length), torch.tensor(architecture.inv_freq)) == (length == 64)
    assert Architecture.from_json(json.loads(json.dumps(architecture.to_json()))) == architecture


_FACTORS = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
AS_ON_THE_HUB = {
    "Phi-3-mini-128k": (
        {"model_type": "phi3", "rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **_FACTORS}},
        {"model_type": "phi3", "rope_parameters": LONGROPE},
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "Phi-4-mini": (
        {
            "model_type": "phi3",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "longrope", **{name: factors[:4] for name, factors in _FACTORS.items()}},
        },
        {
            "model_type": "phi3",
            "rope_parameters": {
                **LONGROPE,
                **{name: factors[:4] for name, factors in _FACTORS.items()},
                "partial_rotary_factor": 0.5,
            },
        },
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "dynamic": (
        {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"model_type": "llama", "rope_parameters": BY_LENGTH["dynamic"]},
        {"max_position_embeddings": 64},
    ),
    "Gemma 3": (
        {
            "model_type": "gemma3_text",
            "rope_theta": 100000.0,
            "rope_local_base_freq": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {
            "model_type": "gemma3_text",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"sliding_window": 9, "head_dim": 16},
    ),
}


@pytest.mark.parametrize("name", AS_ON_THE_HUB)
def test_configurations_as_checkpoints_on_the_hub_have_them_are_understood(name, tmp_path):
    """They were saved by older versions of transformers, with rotary settings beside each other."""
    theirs, now, both = AS_ON_THE_HUB[name]
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**values, "intermediate_size": 96, **both, **theirs}))
    found = architecture_of(folder_config(tmp_path, "m").config, None)
    assert found == architecture_of(config(**both, **now), None)
    assert found.long_texts is not None or found.local_inv_freq


def test_a_rotary_embedding_of_another_type_is_refused():
    stock = config()
    stock.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(CheckpointError, match="'spiral'; expected one of default, linear, llama3, yarn, proportional"):
        architecture_of(stock, None)


def test_an_unknown_activation_is_refused():
    with pytest.raises(CheckpointError, match="'tanh'; expected silu"):
        architecture_of(config(hidden_act="tanh"), None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama"}, (0, 0, 0)),
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, (0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9, 9)),
    ],
)
def test_sliding_windows_are_per_layer(changes, windows):
    assert architecture_of(config(**changes), None).sliding_windows == windows


def test_heads_and_tokens_are_read():
    tied = architecture_of(config(model_type="qwen3", head_dim=24, tie_word_embeddings=True, eos_token_id=[5, 6]), 3)
    assert (tied.heads, tied.kv_heads, tied.head_dim, tied.qk_norm, tied.tied) == (4, 2, 24, True, True)
    assert (tied.bos, tied.eos) == (3, (5, 6))
    plain = architecture_of(config(eos_token_id=None), None)
    assert (plain.head_dim, plain.qk_norm, plain.tied, plain.bos, plain.eos) == (16, False, False, None, ())
    assert architecture_of(config(eos_token_id=2), None).eos == (2,)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_architecture_survives_json(folders, name):
    architecture = architecture_of(open_checkpoint(folders(name)).config, 1)
    assert Architecture.from_json(json.loads(json.dumps(architecture.to_json()))) == architecture


def test_a_field_that_is_missing_or_unknown_is_an_error():
    value = architecture_of(config(), None).to_json()
    with pytest.raises((TypeError, KeyError)):
        Architecture.from_json({**value, "experts": 8})
    value.pop("eos")
    with pytest.raises((TypeError, KeyError)):
        Architecture.from_json(value)
