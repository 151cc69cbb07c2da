"""Counts of active neurons out of a calibration or a trace, and artifacts packed by them."""

from dataclasses import replace

import pytest
import torch

from sparsepack.calibrate.trace_file import Trace, neuron_counts
from sparsepack.errors import PackingError, PlacementError
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack


def whole(traced: Trace) -> torch.Tensor:
    """How often each neuron was active in all sessions: int64 [layers, neurons]."""
    sessions = [traced.session(number) for number in range(len(traced.sessions))]
    return sum(torch.from_numpy(each.astype("int64")).sum(0) for each in sessions).view(traced.layers, traced.neurons)


def test_counts_of_a_trace_are_of_all_its_sessions(traced):
    counts = neuron_counts(traced)
    assert torch.equal(counts.active, whole(traced))
    assert counts.tokens == sum(session.tokens for session in traced.sessions)
    assert (counts.origin, counts.sha256) == ("trace", traced.sha256)


def test_an_artifact_takes_the_order_of_its_neurons_from_a_trace(relu, traced, tmp_path):
    counts = neuron_counts(traced)
    pack(PackRequest(str(relu.path), tmp_path / "m.gguf", format="neuron-q4_k", calibration=traced.path))
    section = open_artifact(tmp_path / "m.gguf").manifest["neurons"]
    assert section == {"trace": traced.sha256, "tokens": counts.tokens, "density": counts.density}
    for layer, active in zip(read_packed(tmp_path / "m.gguf").layers, counts.active, strict=True):
        assert torch.equal(layer.mlp.order, active.argsort(descending=True, stable=True))


def test_a_trace_of_another_model_or_by_thresholds_is_refused(relu, traced, tmp_path, monkeypatch):
    request = PackRequest(str(relu.path), tmp_path / "m.gguf", format="neuron-q4_k", calibration=traced.path)
    other = open_checkpoint(str(relu.path))
    monkeypatch.setattr(type(other), "sha256", "cd" * 32)
    with pytest.raises(PlacementError, match="expected both of one model"):
        pack(request, other)
    by_thresholds = replace(traced, manifest={**traced.manifest, "rule": {"active": "threshold", "share": 0.5}})
    monkeypatch.setattr("sparsepack.calibrate.trace_file.calibration_or_trace", lambda path: by_thresholds)
    with pytest.raises(PackingError, match="trace again without --share"):
        pack(request)
