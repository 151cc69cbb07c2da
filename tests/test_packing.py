"""`pack`: what goes together, where thresholds come from, and that nothing half is left."""

import json
from dataclasses import replace

import pytest
import torch
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.attention import find_attention, heaviest
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import load
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.statistics import importance
from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
from sparsepack.errors import OutputError, PackingError, ThresholdsError, UserError
from sparsepack.files.gguf import read_gguf
from sparsepack.files.text import Text
from sparsepack.formats.open import read_packed
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random model, its calibration `c` and a thresholds table `t.json`."""
    folder = tmp_path_factory.mktemp("pack")
    checkpoint = open_checkpoint(make_model(folder / "m", "qwen2"))
    calibration = calibrate(
        checkpoint, Text("t", (TEXT[:4000],), ""), folder / "c", CalibrateOptions(context=64, samples=4)
    )
    find_thresholds(checkpoint, calibration, AllocationOptions(0.4)).write(folder / "t.json")
    return folder


@pytest.fixture
def request_(source, tmp_path):
    return PackRequest(str(source / "m"), tmp_path / "m.gguf")


def refused(request, kind=PackingError) -> str:
    with pytest.raises(kind) as caught:
        pack(request)
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    assert not request.output.exists()
    return str(caught.value)


def test_an_activation_without_zeros_is_refused_before_its_calibration_is_read(request_, tmp_path):
    message = refused(replace(request_, format="neuron-q4_k", calibration=tmp_path / "none"))
    assert "activation 'silu': its neurons are never exactly inactive" in message


def test_thresholds_that_the_format_has_no_place_for_are_refused_before_they_are_computed(tmp_path, monkeypatch):
    model = make_model(tmp_path / "m", "llama", hidden_act="relu", hidden_size=256, intermediate_size=256)
    text, options = Text("t", (TEXT[:4000],), ""), CalibrateOptions(context=64, samples=2)
    calibrate(open_checkpoint(model), text, tmp_path / "c", options)
    asked = PackRequest(
        str(model), tmp_path / "m.gguf", "neuron-q4_k", tmp_path / "c", allocation=AllocationOptions(0.4)
    )

    def computed(*_: object) -> None:
        raise AssertionError("computed in vain")

    with monkeypatch.context() as patch:
        patch.setattr("sparsepack.calibrate.find_thresholds._sequential", computed)
        assert "has no place for thresholds there; leave the site dense" in refused(asked)
        zigzag = replace(asked, format="zigzag-q4_k")
        too_many = replace(zigzag, sparse_attention=AttentionOptions("double", channels=999))
        assert "channels 999: expected at most 64" in refused(too_many)
    only_attention = replace(asked, allocation=AllocationOptions(0.4, include=("blk.*.attn_*",)))
    assert pack(only_attention).thresholds is not None
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_table_goes_into_the_artifact_with_where_it_came_from(source, request_):
    packed = pack(replace(request_, thresholds=source / "t.json", recipe={"name": "r"}))
    table, artifact = read_thresholds(source / "t.json"), read_packed(request_.output)
    assert packed.path == request_.output
    for (layer, site), rule in table.rules.items():
        assert torch.equal(artifact.layers[layer].sites[site].rule.limits, rule.limits)
    assert artifact.manifest["calibration"]["sha256"] == table.calibration_sha256
    assert artifact.manifest["recipe"] == {"name": "r"}
    assert artifact.manifest["thresholds"]["rows"][0]["threshold"] == table.rules[0, "attn_in"].threshold
    assert artifact.manifest["model"]["sha256"] == open_checkpoint(source / "m").sha256


def test_a_calibration_and_a_target_give_the_same_as_the_table_they_make(source, request_, tmp_path):
    from_table = pack(replace(request_, thresholds=source / "t.json", calibration=source / "c"))
    other = replace(request_, output=tmp_path / "o.gguf", calibration=source / "c", allocation=AllocationOptions(0.4))
    found = pack(other)
    assert found.thresholds.to_json() == from_table.thresholds.to_json()
    assert other.output.read_bytes() == request_.output.read_bytes()


def test_without_sparsity_every_site_is_dense(source, request_):
    for allocation, calibration in (
        (None, None),
        (AllocationOptions(0.0), source / "c"),
        (AllocationOptions(0.0), None),
    ):
        pack(replace(request_, allocation=allocation, calibration=calibration, overwrite=True))
        artifact = read_packed(request_.output)
        assert all(site.rule is None for layer in artifact.layers for site in layer.sites.values())


@pytest.mark.parametrize("format", ["q4_k", "bf16"])
def test_a_plain_gguf_is_packed_dense(request_, format):
    packed = pack(replace(request_, format=format))
    assert packed.thresholds is None
    metadata = read_gguf(request_.output).metadata
    assert metadata["general.architecture"] == "qwen2"
    assert json.loads(metadata["sparsepack.manifest"])["kind"] == format


def test_parts_that_do_not_go_together_are_refused(source, request_):
    table, calibration, half = source / "t.json", source / "c", AllocationOptions(0.5)
    assert "expected one of zigzag-q4_k" in refused(replace(request_, format="gguf"))
    assert "no place for thresholds" in refused(replace(request_, format="q4_k", thresholds=table))
    both = replace(request_, thresholds=table, allocation=half, calibration=calibration)
    assert "not both" in refused(both)
    assert "needs --calibration" in refused(replace(request_, allocation=half))
    unused = replace(request_, calibration=calibration, score=False, fitting=RefitOptions(quantiser="round"))
    assert "changes nothing" in refused(unused)


@pytest.mark.parametrize("sparsity", [-0.5, 1.0, 1.5])
def test_a_sparsity_out_of_range_is_refused_not_taken_for_dense(source, request_, sparsity):
    for calibration in (source / "c", None):
        request = replace(request_, allocation=AllocationOptions(sparsity), calibration=calibration)
        assert "expected at least 0 and below 1" in refused(request, ThresholdsError)


def test_an_existing_output_is_refused_before_the_model_is_opened(request_):
    request_.output.write_text("precious")
    with pytest.raises(OutputError, match="exists already"):
        pack(replace(request_, model="./none"))
    assert request_.output.read_text() == "precious"


def test_a_failure_leaves_neither_half_an_artifact_nor_changes_the_old_one(source, request_, monkeypatch):
    from sparsepack.formats.orders import zigzag

    pack(request_)
    before, calls = request_.output.read_bytes(), []

    def interrupted(weight, *how):
        calls.append(weight)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(weight, *how)

    encode = zigzag.pack
    monkeypatch.setattr(zigzag, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(replace(request_, thresholds=source / "t.json", overwrite=True))
    assert [entry.name for entry in request_.output.parent.iterdir()] == ["m.gguf"]
    assert request_.output.read_bytes() == before


def test_thresholds_of_another_model_are_refused(source, request_, tmp_path):
    other = make_model(tmp_path / "other", "qwen2", seed=9)
    assert "of another model" in refused(
        replace(request_, model=str(other), thresholds=source / "t.json"), ThresholdsError
    )


DOUBLE = AttentionOptions("double", channels=4, tokens="1/4", sinks=1, recent=2, min_context=8, dense_layers="1")


def test_sparse_attention_goes_into_the_artifact_with_thresholds_or_without(source, request_):
    asked = replace(request_, calibration=source / "c", sparse_attention=DOUBLE)
    pack(asked)
    alone = read_packed(request_.output)
    assert alone.manifest["thresholds"] is None
    assert alone.manifest["attention"]["calibration"] == load(source / "c").sha256
    pack(replace(asked, allocation=AllocationOptions(0.4), overwrite=True))
    both = read_packed(request_.output)
    assert both.manifest["thresholds"]["sparsity"] == 0.4
    assert both.layers[0].sites["mlp_in"].rule is not None
    pack(replace(asked, thresholds=source / "t.json", overwrite=True))
    for packed in (alone, both, read_packed(request_.output)):
        assert packed.attention.policy == DOUBLE.policy
        (channels, dense) = packed.attention.channels
        assert dense is None
        assert channels.tolist() == heaviest(importance(load(source / "c"))[0].product, 4).tolist()


def test_what_is_found_of_attention_is_told_and_kept(source, request_):
    options = replace(DOUBLE, dense_layers="auto", tokens="1/4")
    calibration = load(source / "c")
    found = find_attention(open_checkpoint(source / "m"), calibration, options)
    assert pack(replace(request_, calibration=source / "c", sparse_attention=options)).notes == found.notes
    assert read_packed(request_.output).manifest["notes"] == list(found.notes)


def test_attention_that_does_not_go_together_is_refused(source, request_):
    asked = replace(request_, calibration=source / "c", sparse_attention=DOUBLE)
    assert "--attention needs --calibration" in refused(replace(asked, calibration=None))
    assert "place for sparse attention; leave --attention out or use zigzag" in refused(replace(asked, format="q4_k"))
    assert "channels 65: expected at most 64" in refused(replace(asked, sparse_attention=replace(DOUBLE, channels=65)))
    assert "expected at least sinks" in refused(replace(asked, sparse_attention=replace(DOUBLE, min_context=2)))
    rounded = RefitOptions(quantiser="round")
    none = replace(asked, sparse_attention=AttentionOptions(), score=False, fitting=rounded)
    assert "say what to take from it: --sparsity, --attention" in refused(none)
