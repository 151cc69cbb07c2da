"""Checkpoints that are no accident."""

import json
import os

import pytest
from models_for_tests import make_model

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "m")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused_before_anything_is_opened(model, name):
    (model / "model.safetensors").rename(model / "x.safetensors")  # else the index is not read
    os.mkfifo(model.parent / "secret.safetensors")  # whoever opens it waits for ever
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": None}}, None]
)
def test_an_index_of_another_type_is_one_line(model, index):
    (model / "model.safetensors").rename(model / "x.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a shard index") as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)


def test_an_index_whose_shard_has_too_long_a_name_is_one_line(model):
    (model / "model.safetensors").rename(model / "x.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 400}}))
    with pytest.raises(CheckpointError, match=r"the shard x+ of .* is missing"):
        open_checkpoint(model)


HOSTILE = {
    "model_type": ["llama"],
    "num_hidden_layers": 10**12,
    "hidden_size": "256",
    "num_attention_heads": 0,
    "num_key_value_heads": -1,
    "vocab_size": None,
    "intermediate_size": 2.5,
    "max_position_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": "x"},
    "layer_types": 7,
    "head_dim": "x",
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_configuration_of_wrong_types_is_one_line(model, field):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: HOSTILE[field]}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model).architecture  # noqa: B018
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["[]", "7", '{"a": ' + "9" * 5000 + "}", "[" * 100_000, '{"model_type": "\\ud800"}']
)
def test_a_configuration_that_is_none_is_one_line(model, content):
    (model / "config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)
