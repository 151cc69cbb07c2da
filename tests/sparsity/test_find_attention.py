"""From a calibration to sparse attention: which channels, which layers stay dense, and what is refused."""

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from sparsepack.calibrate.attention import find_attention, heaviest, measured_for
from sparsepack.calibrate.statistics import MEASURED, importance
from sparsepack.calibrate.thresholds import AttentionOptions
from sparsepack.errors import CalibrationError, PackingError
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.option import default_of

DOUBLE = AttentionOptions("double", channels=8, dense_layers="none")


def refused(asked: Any, error: type[Exception] = PackingError) -> str:
    with pytest.raises(error) as caught:
        asked()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _missing(calibration, *lost):
    """The calibration, its layers missing so much at every share."""
    layers = []
    for layer, share in zip(calibration.layers, lost, strict=True):
        counts = layer["attention.missed_positions"]
        layers.append({**layer, "attention.missed": counts * share})
    return replace(calibration, layers=tuple(layers))


def test_channels_are_the_most_important_ones_of_each_head(small, small_calibration):
    found = find_attention(small, small_calibration, DOUBLE)
    assert found.calibration_sha256 == small_calibration.sha256
    assert found.notes == ()
    for layer, of in zip(found.sparse.channels, importance(small_calibration), strict=True):
        assert (layer.shape, layer.dtype) == ((2, 8), torch.int64)
        assert (layer.diff() > 0).all()
        best = of.product.gather(1, layer).sort(1, descending=True).values
        assert torch.equal(best, of.product.topk(8).values)


def test_of_equal_channels_the_first_are_taken():
    product = torch.tensor([[1.0, 2, 1, 1, 2, 0]], dtype=torch.float64)
    assert heaviest(product, 3).tolist() == [[0, 1, 4]]


def test_layers_that_miss_more_than_half_stay_dense_and_are_named(small, small_calibration):
    calibration = _missing(small_calibration, 0.7, 0.5, 0.51)
    found = find_attention(small, calibration, replace(DOUBLE, dense_layers="auto", tokens="1/8"))
    assert [channels is None for channels in found.sparse.channels] == [True, False, True]
    (note,) = found.notes
    assert "layers 0, 2 read every token: the best 1/8 of them would miss 70%, 51%" in note
    (note,) = find_attention(small, _missing(small_calibration, 0, 1, 0), replace(DOUBLE, dense_layers="auto")).notes
    assert "layer 1 reads every token" in note


def test_layers_that_are_named_stay_dense_whatever_they_miss(small, small_calibration):
    calibration = _missing(small_calibration, 0.9, 0.9, 0)
    for named, dense in (("0,2", [0, 2]), ("1", [1]), ("0, 1", [0, 1]), ("none", [])):
        found = find_attention(small, calibration, replace(DOUBLE, dense_layers=named))
        assert [n for n, channels in enumerate(found.sparse.channels) if channels is None] == dense
        assert found.notes == ()


def test_a_quarter_of_the_channels_unless_the_user_says_how_many(small, small_calibration):
    found = find_attention(small, small_calibration, replace(DOUBLE, channels=None))
    assert found.sparse.channels[0].shape == (2, 16)


@pytest.mark.parametrize(
    ("tokens", "measured"),
    [("1/4", "1/4"), ("1/8", "1/8"), ("1/32", "1/32"), ("1/5", "1/4"), ("0.1", "1/8"), ("1/64", "1/32")],
)
def test_what_is_missed_is_that_of_the_next_larger_share(tokens, measured):
    assert MEASURED[measured_for(Fraction(tokens))] == Fraction(measured)


def test_the_share_that_was_measured_is_named(small, small_calibration):
    asked = replace(DOUBLE, dense_layers="auto", tokens="1/100")
    (note,) = find_attention(small, _missing(small_calibration, 0.7, 0, 0), asked).notes
    assert "the best 1/32 of them would miss 70%" in note
    said = refused(lambda: find_attention(small, _missing(small_calibration, 0.7, 0.7, 0.7), asked))
    assert "tokens 1/100: the best 1/32 of them miss more than half" in said


@pytest.mark.parametrize("tokens", ["1/3", "0.26", "999/1000"])
def test_no_layer_is_dense_by_itself_at_shares_above_those_measured(small, small_calibration, tokens):
    lost = _missing(small_calibration, 0.9, 0.9, 0.9)
    found = find_attention(small, lost, replace(DOUBLE, dense_layers="auto", tokens=tokens))
    assert None not in found.sparse.channels
    assert found.notes == ()


def test_the_policy_is_exact_and_defaults_are_the_runtimes():
    policy = replace(DOUBLE, tokens="0.0625", sinks=1, recent=2, min_context=3).policy
    assert policy == TokenPolicy(Fraction(1, 16), 1, 2, 3)
    for field in fields(TokenPolicy):
        if field.name != "tokens":
            assert default_of(AttentionOptions, field.name) == field.default


@pytest.mark.parametrize(
    "tokens",
    [
        "0",
        "0/5",
        "2",
        "9/8",
        "1/0",
        "-1/8",
        "1e3",
        "1e-",
        "e-3",
        "1/8e-1",
        "1e-999",
        "x",
        "",
        "1/8/2",
        "1 / 8",
        "9" * 5000,
    ],
)
def test_tokens_that_are_no_share_are_refused(tokens):
    said = refused(replace(DOUBLE, tokens=tokens).check)
    assert "expected a share above 0 and at most 1, such as 1/16 or 0.0625" in said


@pytest.mark.parametrize("tokens", ["1e-5", "1e-05", "1.0e-5", "0.00001", "1/100000"])
def test_tokens_may_be_written_as_numbers_are(tokens):
    asked = replace(DOUBLE, tokens=tokens)
    asked.check()
    assert asked.policy.tokens == Fraction(1, 100_000)


@pytest.mark.parametrize("tokens", ["1", "1/1", "1.0", "7/7"])
def test_a_share_of_all_is_no_sparse_attention(tokens):
    said = refused(replace(DOUBLE, tokens=tokens).check)
    assert "all of them, which is no sparse attention; expected a smaller share, or attention none" in said


def test_options_that_do_not_go_together_are_refused():
    assert "33333333/100000000; expected a fraction of smaller" in refused(replace(DOUBLE, tokens="0.33333333").check)
    assert "at least sinks + recent, 69" in refused(replace(DOUBLE, sinks=5, min_context=68).check)
    assert "dense layers '0;1': expected auto, none" in refused(replace(DOUBLE, dense_layers="0;1").check)
    assert "min_context 2000: it is for attention double, not none; leave it out" in refused(
        AttentionOptions(min_context=2000).check
    )
    assert "attention 'triple': expected one of" in refused(AttentionOptions("triple").check)
    AttentionOptions().check()


def test_what_the_model_does_not_have_is_refused(small, small_calibration):
    def asked(**changes):
        return lambda: find_attention(small, small_calibration, replace(DOUBLE, **changes))

    assert "channels 65: expected at most 64" in refused(asked(channels=65))
    assert "has layers 0 to 2" in refused(asked(dense_layers="1,3"))
    assert "dense layers: all of them" in refused(asked(dense_layers="2,1,0"))
    lost = _missing(small_calibration, 0.6, 0.7, 0.8)
    said = refused(lambda: find_attention(small, lost, replace(DOUBLE, dense_layers="auto")))
    assert "more than half of the attention weight in every layer" in said


def test_calibrations_of_other_heads_or_models_are_refused(small, tiny, small_calibration):
    manifest = small_calibration.manifest
    other = replace(small_calibration, manifest={**manifest, "attention": {**manifest["attention"], "head_dim": 32}})
    assert "heads are" in refused(lambda: find_attention(small, other, DOUBLE), CalibrationError)
    assert "calibrate this model" in refused(lambda: find_attention(tiny, small_calibration, DOUBLE), CalibrationError)
