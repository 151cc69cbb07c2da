"""Fields that transformers takes without a look: what is refused, in one line with file, field and a way out."""

import json

import pytest
from models_for_tests import edit_config, make_model

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.configuration import folder_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Only a config.json is read here, of each family one that stock transformers wrote."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder / family, family) for family in ("llama", "gemma3_text", "phi3", "qwen2")}


def refused(models, tmp_path, family, **changes) -> str:
    (tmp_path / "config.json").write_text((models[family] / "config.json").read_text())
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        folder_config(tmp_path, "m")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert "; expected " in message
    return message


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rotary", "told"),
    [
        (
            {"rope_type": "mrope"},
            '.rope_type is "mrope", which transformers does not know; expected one of default, lin',
        ),
        ({"type": "mrope", "mrope_section": [1, 2]}, '.type is "mrope", which transformers does not know'),
        ({"rope_type": ["linear"]}, '.rope_type is ["linear"], which transformers does not know'),
        ({"rope_type": None}, ".rope_type is null, which transformers does not know"),
        ({"rope_type": "linear", "factor": "4"}, '.factor is "4"; expected a number above 0'),
        ({"rope_type": "linear", "factor": None}, ".factor is null; expected a number above 0"),
        ({"rope_type": "linear", "factor": 0}, ".factor is 0; expected a number above 0"),
        ({"rope_type": "dynamic", "factor": True}, ".factor is true; expected a number above 0"),
        ({"rope_type": "default", "rope_theta": "many"}, '.rope_theta is "many"; expected a number above 0'),
        ({**LLAMA3, "low_freq_factor": "1"}, '.low_freq_factor is "1"; expected a number above 0'),
        (
            {**LLAMA3, "original_max_position_embeddings": "64"},
            '.original_max_position_embeddings is "64"; expected a n',
        ),
        ({"rope_type": "yarn", "factor": float("nan")}, ".factor is NaN; expected a number above 0"),
        (
            {"rope_type": "longrope", **FACTORS, "long_factor": ["2"]},
            '.long_factor is ["2"]; expected a list of numbers',
        ),
    ],
)
def test_a_rotary_embedding_that_transformers_stumbles_over_is_named(models, tmp_path, field, rotary, told):
    assert f": {field}{told}" in refused(models, tmp_path, "llama", **{"rope_parameters": None, field: rotary})


def test_the_kind_of_layer_whose_rotary_embedding_it_is_is_named(models, tmp_path):
    rotary = json.loads((models["gemma3_text"] / "config.json").read_text())["rope_parameters"]
    rotary["sliding_attention"]["rope_type"] = "spiral"
    told = refused(models, tmp_path, "gemma3_text", rope_parameters=rotary)
    assert ': rope_parameters.sliding_attention.rope_type is "spiral"' in told


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2"])
@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "banana"])
def test_attention_that_is_not_computed_here_is_refused_and_not_taken_for_full_attention(
    models, tmp_path, family, kind
):
    kinds = json.loads((models[family] / "config.json").read_text())["layer_types"]
    told = refused(models, tmp_path, family, layer_types=[*kinds[:-1], kind])
    assert f': layer_types names "{kind}"; expected full_attention or sliding_attention: ' in told


def test_an_old_phi_says_how_its_rotary_embedding_is_called_today(models, tmp_path):
    """Phi-3's first revisions say "su"; transformers means to take it, and fails."""
    values = {"rope_parameters": None, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    told = refused(models, tmp_path, "phi3", **values, rope_scaling={"type": "su", **FACTORS})
    assert ': rope_scaling.type is "su", which transformers no longer understands; expected "longrope"' in told
    edit_config(tmp_path, rope_scaling={"type": "longrope", **FACTORS})
    assert folder_config(tmp_path, "m").config.rope_parameters["rope_type"] == "longrope"


def test_a_field_of_the_text_part_is_named_as_such(models, tmp_path):
    text = json.loads((models["llama"] / "config.json").read_text())
    text["rope_parameters"] = {"rope_type": "mrope", "rope_theta": 10000.0}
    told = refused(models, tmp_path, "llama", model_type="llava", text_config=text)
    assert ': text_config.rope_parameters.rope_type is "mrope"' in told


def test_what_a_rotary_embedding_finds_by_itself_may_be_null(models, tmp_path):
    (tmp_path / "config.json").write_text((models["llama"] / "config.json").read_text())
    rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "beta_fast": None}
    edit_config(tmp_path, rope_parameters={**rotary, "original_max_position_embeddings": 64})
    assert folder_config(tmp_path, "m").config.rope_parameters["factor"] is None


@pytest.mark.parametrize(
    ("field", "value"), [("num_labels", 10**12), ("num_hidden_layers", 10**12), ("num_labels", -1)]
)
def test_counts_of_which_transformers_makes_lists_have_a_bound(models, tmp_path, field, value):
    assert f": {field} is {value}; expected a whole number of at most " in refused(
        models, tmp_path, "qwen2", **{field: value}
    )
    text = json.loads((models["llama"] / "config.json").read_text()) | {field: value}
    assert f": text_config.{field} is {value}" in refused(
        models, tmp_path, "llama", model_type="llava", text_config=text
    )
