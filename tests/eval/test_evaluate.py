"""`evaluate`: a checkpoint, one with thresholds, and artifacts, through one report."""

import json
import math
from dataclasses import replace

import pytest
import torch

from sparsepack.errors import TextError, UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.results import evaluation_table
from sparsepack.eval.run import evaluate
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.packing import PackRequest, pack

TINY = EvalRequest("shipped:tiny", perplexity=("shipped:heldout",), context=64, windows=4)


def test_a_checkpoint_is_dense_and_says_so():
    result = evaluate(TINY)
    json.dumps(result)
    row = result["perplexity"][0]
    assert (result["protocol"], row["protocol"], row["context"], row["windows"]) == ("dense", "dense", 64, 4)
    assert row["targets"] == 4 * 64
    assert row["windows_of"] is None  # it is not looked how many more there are
    nothing = {"target": 0.0, "target_overall": 0.0, "overall": 0, "of_sparse_sites": 0.0, "sites": {}}
    nothing |= {"neurons_counted": None, "bits": None, "bits_read": None}
    assert row["realised_sparsity"] == nothing
    assert row["served"] is None
    assert result["subject"]["kind"] == "checkpoint"
    assert result["tasks"] is None


@pytest.mark.parametrize("name", ["shipped:tiny", "m.gguf"])
def test_by_default_a_cpu_computes_in_float32_whatever_the_weights_are_stored_in_and_says_so(half, name):
    """So the default changes no figure; 16 bits do, and only where they are asked for."""
    asked = replace(TINY, subject=name if name == TINY.subject else str(half / name), against="shipped:tiny")
    results = {dtype: evaluate(replace(asked, dtype=dtype)) for dtype in ("auto", "float32", "bfloat16")}
    assert asked.dtype == "auto"
    assert results["auto"] == results["float32"]
    compute = results["auto"]["compute"]
    stored = "bfloat16" if name == TINY.subject else "Q4_K"
    assert (compute["dtype"], compute["weights"], compute["device"]) == ("float32", stored, "cpu")
    assert f"computed in float32 on cpu; weights stored in {stored}" in evaluation_table(results["auto"])
    assert results["bfloat16"]["compute"]["dtype"] == "bfloat16"
    exact, rounded = (results[dtype]["perplexity"][0]["perplexity"]["value"] for dtype in ("auto", "bfloat16"))
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=0.02)


def test_tasks_take_the_whole_model_and_texts_do_not(half, monkeypatch):
    """Texts are scored by blocks; only tasks, whose rows are short and many, hold the model."""
    from sparsepack.eval import subject

    built = []
    build = subject.build_model
    monkeypatch.setattr(subject, "build_model", lambda *given: built.append(given) or build(*given))
    monkeypatch.setattr("sparsepack.eval.tasks.run_tasks", lambda *_, **__: {})
    evaluate(replace(TINY, subject=str(half / "m.gguf"), against="shipped:tiny", windows=1))
    assert built == []
    evaluate(replace(TINY, tasks=("any",), windows=1))
    assert len(built) == 1


@pytest.mark.long
def test_without_a_context_it_is_the_models_own_up_to_2048(shared):
    assert evaluate(replace(TINY, context=None, windows=1))["perplexity"][0]["context"] == 1024
    silu = replace(TINY, subject=str(shared / "models" / "books-26m-silu"), context=None, windows=1)
    assert evaluate(silu)["perplexity"][0]["context"] == 2048


def test_bits_per_byte_are_those_of_the_text():
    """By the bytes of the very text that the windows cover: the tokens of this tokenizer are whole characters here."""
    result = evaluate(TINY)["perplexity"][0]
    tokenizer = open_checkpoint("shipped:tiny").tokenizer
    text = read_text("shipped:heldout").joined
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    nbytes = len(text[: offsets[4 * 64 - 1][1]].encode())
    nll = 4 * 64 * math.log(result["perplexity"]["value"])
    assert result["bits_per_byte"] == pytest.approx(nll / math.log(2) / nbytes)


def test_a_checkpoint_with_thresholds_decodes_sparse_and_reports_what_was_skipped(half):
    result = evaluate(replace(TINY, thresholds=half / "t.json", against="shipped:tiny", windows=8))
    row = result["perplexity"][0]
    assert result["protocol"] == "decode"
    assert row["targets"] == 8 * 32
    sparsity = row["realised_sparsity"]
    assert sparsity["target"] == 0.5
    assert sparsity["overall"] == pytest.approx(0.5, abs=0.03)
    assert sparsity["overall"] == pytest.approx(sparsity["of_sparse_sites"])
    assert len(sparsity["sites"]) == 12
    assert row["kl_divergence"]["value"] > 0
    assert row["perplexity_ratio"]["value"] == pytest.approx(row["perplexity"]["value"] / row["source_perplexity"])


def test_sparsity_over_the_sparse_sites_is_comparable_to_the_target(half):
    """`overall` counts the dense sites as 0."""
    sparsity = evaluate(replace(TINY, thresholds=half / "mlp.json", windows=8))["perplexity"][0]["realised_sparsity"]
    subject = open_subject("shipped:tiny")
    share = sum(s for (_, site), s in subject.parameter_shares().items() if site.startswith("mlp"))
    assert sparsity["of_sparse_sites"] == pytest.approx(0.5, abs=0.03)
    assert sparsity["overall"] == pytest.approx(sparsity["of_sparse_sites"] * share)
    assert sparsity["target_overall"] == pytest.approx(0.5 * share)


def test_each_text_has_its_own_row_and_counts(half):
    one = evaluate(replace(TINY, thresholds=half / "t.json", perplexity=("shipped:train",)))["perplexity"]
    both = evaluate(replace(TINY, thresholds=half / "t.json", perplexity=("shipped:heldout", "shipped:train")))
    assert [row["text"] for row in both["perplexity"]] == ["shipped:heldout", "shipped:train"]
    assert both["perplexity"][1] == one[0]


def test_what_is_scored_is_said_and_can_be_the_same_under_each_protocol(half):
    asked = [{"protocol": "decode"}, {"protocol": "dense"}, {"protocol": "dense", "second_half": True}]
    rows = [evaluate(replace(TINY, thresholds=half / "t.json", **changes))["perplexity"][0] for changes in asked]
    assert [row["scored"] for row in rows] == ["second half", "all", "second half"]
    assert rows[1]["targets"] == 2 * rows[0]["targets"] == 2 * rows[2]["targets"]
    assert rows[2]["perplexity"]["value"] < rows[0]["perplexity"]["value"]


@pytest.mark.parametrize("protocol", ["dense", "all", "decode"])
def test_the_protocol_asked_for_is_the_one_used(half, protocol):
    result = evaluate(replace(TINY, thresholds=half / "t.json", protocol=protocol))
    assert result["protocol"] == result["perplexity"][0]["protocol"] == protocol
    assert bool(result["perplexity"][0]["realised_sparsity"]["sites"]) == (protocol != "dense")


def test_a_zigzag_artifact_is_its_own_weights_and_rules(half):
    """Dequantised weights differ from the source's; thresholds and tokens are the same."""
    artifact, table = str(half / "m.gguf"), half / "t.json"
    packed = evaluate(replace(TINY, subject=artifact, against="shipped:tiny", windows=8))
    source = evaluate(replace(TINY, thresholds=table, against="shipped:tiny", windows=8))
    assert packed["subject"]["kind"] == "zigzag-q4_k"
    assert packed["protocol"] == "decode"
    assert packed["subject"]["target_sparsity"] == 0.5
    ours, theirs = packed["perplexity"][0], source["perplexity"][0]
    assert ours["source_perplexity"] == theirs["source_perplexity"]
    assert ours["perplexity"]["value"] == pytest.approx(theirs["perplexity"]["value"], rel=0.2)
    assert ours["perplexity"]["value"] != theirs["perplexity"]["value"]
    assert ours["realised_sparsity"]["overall"] == pytest.approx(theirs["realised_sparsity"]["overall"], abs=0.02)


def test_an_artifact_keeps_rules_bit_for_bit_and_norms_too(half):
    subject, source = open_subject(str(half / "m.gguf")), open_checkpoint("shipped:tiny")
    table = open_subject("shipped:tiny", _table(half))
    assert subject.rules.keys() == table.rules.keys()
    for key, rule in table.rules.items():
        assert torch.equal(subject.rules[key].threshold, rule.limits)
    assert torch.equal(subject.model.model.norm.weight, source.tensor("model.norm.weight").float())
    weight = source.tensor("model.layers.0.self_attn.q_proj.weight").float()
    error = (subject.model.model.layers[0].self_attn.q_proj.weight - weight).norm() / weight.norm()
    assert 0.03 < error < 0.12
    assert subject.source_sha256 == source.sha256


def _table(half):
    from sparsepack.calibrate.threshold_table import read_thresholds

    return read_thresholds(half / "t.json")


@pytest.mark.parametrize("name", ["stories-260k", "books-26m-silu"])
def test_an_artifacts_tokenizer_is_the_checkpoints(shared, tmp_path, name):
    checkpoint = open_checkpoint(shared / "models" / name)
    pack(PackRequest(checkpoint.name, tmp_path / "m.gguf", format="zigzag-q4_k"))
    text = read_text(str(shared / "text" / "tinystories.sample.txt.xz"))
    text = replace(text, documents=(text.joined[:5000] + " Zwei Übel — “naïve”\n\n\t1,234",))
    ours, theirs = open_subject(str(tmp_path / "m.gguf")).tokenizer, checkpoint.tokenizer
    for one, other in zip(rolling_windows(ours, text, 64), rolling_windows(theirs, text, 64), strict=True):
        assert torch.equal(one, other)


def refused(request, kind=UserError) -> str:
    with pytest.raises(kind) as caught:
        evaluate(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_source_than_the_subjects_is_refused(half, shared):
    other = str(shared / "models" / "stories-260k")
    assert "not the model that shipped:tiny was made from" in refused(replace(TINY, against=other))
    assert "was made from" in refused(replace(TINY, subject=str(half / "m.gguf"), against=other))


def test_thresholds_of_another_model_or_beside_an_artifact_are_refused(half, shared):
    other = replace(TINY, subject=str(shared / "models" / "stories-260k"), thresholds=half / "t.json")
    assert "the thresholds are of another model" in refused(other)
    artifact = replace(TINY, subject=str(half / "m.gguf"), thresholds=half / "t.json")
    assert "carries its own thresholds" in refused(artifact)


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("A few words.")
    message = refused(replace(TINY, perplexity=(str(tmp_path / "a.txt"),)), TextError)
    assert "fewer than one window of 64" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1025}, "context 1025: shipped:tiny was made for at most 1024"),
        ({"context": 1}, "context 1: expected at least 2"),
        ({"windows": 0}, "windows 0"),
        ({"batch": 0}, "batch 0"),
        ({"limit": 0}, "limit 0: expected at least 1"),
        ({"protocol": "prefill"}, "'prefill': expected one of decode, all, dense"),
        ({"perplexity": ()}, "nothing to evaluate"),
        ({"perplexity": ("none.txt",)}, "none.txt: no such file"),
        ({"subject": "./none"}, "no such model folder or file"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(changes, message):
    assert message in refused(replace(TINY, **changes))


def test_a_context_beyond_the_model_is_refused_before_any_window_is_run(monkeypatch):
    from sparsepack.eval import run

    monkeypatch.setattr(run, "rolling_windows", lambda *_: pytest.fail("tokenised"))
    refused(replace(TINY, context=4096), TextError)


@pytest.mark.parametrize(("batch", "windows", "requests"), [(None, 1, 8), (1, 1, 1), (16, 16, 16)])
def test_a_batch_that_is_given_holds_for_tasks_too_and_each_part_says_what_was_used(
    monkeypatch, batch, windows, requests
):
    asked = []
    monkeypatch.setattr("sparsepack.eval.tasks.run_tasks", lambda *given: asked.append(given[2]) or {})
    result = evaluate(replace(TINY, tasks=("any",), windows=1, batch=batch))
    assert [request.requests_at_once for request in asked] == [requests]
    assert (result["compute"]["batch"], result["tasks"]["batch"]) == (windows, requests)
