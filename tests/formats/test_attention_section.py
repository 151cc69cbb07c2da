"""Sparse attention in artifacts: what was packed is read back, and what cannot be the model's is refused."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import plan_zigzag, write_zigzag
from forged import forge
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rules import rules

from sparsepack.errors import ArtifactError
from sparsepack.formats import manifest as manifests
from sparsepack.formats.attention import attention_section, attention_summary, sparse_attention_of
from sparsepack.formats.blocks.labels import LABEL_BITS
from sparsepack.formats.inspect import describe
from sparsepack.formats.manifest import read_manifest
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy

CHANNELS = torch.tensor([[0, 5, 63], [1, 2, 3]])
POLICY = TokenPolicy(Fraction(1, 8), sinks=2, recent=5, min_context=10)
SPARSE = SparseAttention(POLICY, (None, CHANNELS))


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """Two layers, two KV heads of 64 channels."""
    return checkpoints["llama"]


@pytest.fixture(scope="module")
def section(llama: Checkpoint) -> dict[str, Any]:
    return attention_section(SPARSE, heads_of_config(llama.config), "ab" * 32)


def same(found: SparseAttention | None, expected: SparseAttention) -> bool:
    assert found is not None
    pairs = zip(found.channels, expected.channels, strict=True)
    return found.policy == expected.policy and all(
        a is b if a is None or b is None else a.dtype == torch.int64 and torch.equal(a, b) for a, b in pairs
    )


def test_it_goes_through_a_zigzag_gguf(llama: Checkpoint, section: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert write_zigzag(llama, rules(llama), path, attention=section, notes=("said",)) == ("said",)
    packed = read_packed(path)
    assert packed.manifest["notes"] == ["said"]
    assert packed.manifest["attention"] == section
    assert section["label_bits"] == LABEL_BITS
    artifact = open_artifact(path)
    for found in (packed.attention, artifact.attention(), artifact.stock().attention):
        assert same(found, SPARSE)
    report = verify(path, llama)
    assert report.passed, report.problems
    assert "sparse attention" in report.checked


def test_without_it_a_file_has_no_section(llama: Checkpoint, zigzag_files: dict[str, Path]) -> None:
    packed = read_packed(zigzag_files["llama"])
    assert packed.attention is None
    assert "sparse attention" not in verify(zigzag_files["llama"]).checked
    assert describe(zigzag_files["llama"])["attention"] is None


def test_a_sparsepack_from_before_refuses_it(
    llama: Checkpoint, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zigzag(llama, {}, tmp_path / "m.gguf", attention=section)
    monkeypatch.setattr(manifests, "SCHEMA", 2)
    with pytest.raises(ArtifactError, match=r"schema 6 .* update sparsepack"):
        open_artifact(tmp_path / "m.gguf")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_are_the_same_by_configuration_and_by_the_engines_numbers(
    checkpoints: dict[str, Checkpoint], family: str
) -> None:
    checkpoint = checkpoints[family]
    assert checkpoint.architecture.heads_and_rope == heads_of_config(checkpoint.config)


def test_a_stock_configuration_will_do(llama: Checkpoint, section: dict[str, Any]) -> None:
    for model in (llama.config, llama.architecture):
        assert same(sparse_attention_of({"attention": section}, model), SPARSE)
        assert sparse_attention_of({}, model) is None


OTHERS = {
    "head_dim 32, the model has 64": {"head_dim": 32, "channels": [None, [[0, 5, 31], [1, 2, 3]]]},
    "kv_heads 1, the model has 2": {"kv_heads": 1, "channels": [None, [[0, 5, 63]]]},
    "layers 3, the model has 2": {"channels": [None, None, CHANNELS.tolist()]},
    "rotary.convention interleaved, the model has half-split": {"rotary": {"convention": "interleaved", "dims": 64}},
    "rotary.dims 32, the model has 64": {"rotary": {"convention": "half-split", "dims": 32}},
}
BROKEN = {
    "kind: Input should be 'double'": {"kind": "triple"},
    "label_bits: Input should be 4": {"label_bits": 8},
    "groups: Input should be 'mean'": {"groups": "max"},
    "tokens: .*'9/8', expected a share": {"tokens": "9/8"},
    "tokens: .*'0/8', expected a share": {"tokens": "0/8"},
    "tokens: .*'1/2000000', expected a share": {"tokens": "1/2000000"},
    "tokens: Input should be a valid string": {"tokens": 0.125},
    "recent: Input should be greater": {"recent": 0},
    "min_context 6, expected sinks": {"min_context": 6},
    "every layer is dense": {"channels": [None, None]},
    "expected those of 2 KV heads in every": {"channels": [None, [[1, 2, 3]]]},
    "3 in one head and 2 in another": {"channels": [None, [[1, 2, 3], [1, 2]]]},
    "0 in one head and 0 in another": {"channels": [None, [[], []]]},
    "ascending numbers below 64": {"channels": [None, [[1, 2, 64], [1, 2, 3]]]},
    "ascending .* without repetition": {"channels": [None, [[1, 2, 2], [1, 2, 3]]]},
    "ascending numbers .*": {"channels": [None, [[2, 1, 3], [1, 2, 3]]]},
    "channels.1.0.0: Input should be a valid integer": {"channels": [None, [["1", 2, 3], [1, 2, 3]]]},
    "reordered: Extra inputs are not permitted": {"reordered": True},
}


@pytest.mark.parametrize("said", [*OTHERS, *BROKEN])
def test_what_is_not_understood_or_not_of_the_model_is_refused(
    llama: Checkpoint, section: dict[str, Any], tmp_path: Path, said: str
) -> None:
    changed = {**section, **(OTHERS | BROKEN)[said]}
    with pytest.raises(ArtifactError, match=rf"^the manifest: attention: .*{said}.*; pack the model again") as caught:
        sparse_attention_of({"attention": changed}, llama.config)
    assert "\n" not in str(caught.value)
    path = tmp_path / "m.gguf"
    forge(plan_zigzag(llama, {}, attention=changed)).write(path)
    with pytest.raises(ArtifactError, match=rf"m\.gguf.*attention.*{said}"):
        read_packed(path)
    (problem,) = verify(path).problems
    assert "attention" in problem


def test_a_format_without_a_place_for_it_is_refused(section: dict[str, Any]) -> None:
    source = {"name": "m", "sha256": "0", "model_type": "llama"}
    whole = {"schema": 3, "sparsepack": "1", "model": source, "tensors": {}, "notes": [], "attention": section}
    for name, format in FORMATS.items():
        if format.attention:
            assert read_manifest({**whole, "kind": name}, "here")["attention"] == section
        else:
            with pytest.raises(ArtifactError, match=f"here .*{name} has no place for attention"):
                read_manifest({**whole, "kind": name}, "here")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), layers=st.integers(1, 4), kv_heads=st.integers(1, 3), count=st.integers(1, 64))
def test_any_attention_of_a_model_is_read_as_it_was_written(
    llama: Checkpoint, data: Any, layers: int, kv_heads: int, count: int
) -> None:
    def heads(draw: Any) -> torch.Tensor:
        return torch.stack([torch.randperm(64)[:count].sort().values for _ in range(kv_heads)])

    dense = data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    denominator = data.draw(st.integers(1, 1 << 20))
    tokens = Fraction(data.draw(st.integers(1, denominator)), denominator)
    always = data.draw(st.integers(0, 100)), data.draw(st.integers(1, 100))
    policy = TokenPolicy(tokens, *always, min_context=sum(always) + data.draw(st.integers(0, 100)))
    sparse = SparseAttention(policy, tuple(None if n in dense else heads(data) for n in range(layers)))
    model = replace(llama.architecture, layers=layers, kv_heads=kv_heads)
    stored = json.loads(json.dumps(attention_section(sparse, model.heads_and_rope, "0" * 64)))
    assert same(sparse_attention_of({"attention": stored}, model), sparse)


def test_the_summary_counts_bytes_and_names_dense_layers(section: dict[str, Any]) -> None:
    summary = attention_summary({"attention": section})
    assert summary is not None
    assert (summary["channels"], summary["dense_layers"], summary["layers"]) == (3, [0], 2)
    assert summary["label_bytes"] == 2 * (8 // 2 + 2), "three channels have the room of eight, and a scale"
    assert summary["key_value_bytes"] == 2 * 2 * 64 * 2 * 2
    told = summary["in_words"]
    assert "reads 1/8 of them: the first 2, the last 5, and those that 3 channels rank best" in told
    assert "; layer 0 of 2 reads all; labels take 12 bytes a token, keys and values in 16 bits 1,024" in told
    for dense, said in (([], "no layer reads all"), ([0, 2], "layers 0, 2 of 3 read all")):
        layers = [None if layer in dense else CHANNELS.tolist() for layer in range(3)]
        other = attention_summary({"attention": {**section, "channels": layers}})
        assert other is not None
        assert said in other["in_words"]
