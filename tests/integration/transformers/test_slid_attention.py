"""A slid folder with sparse attention: what transformers and `eval` make of it."""

import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import TEXT, make_model

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.formats.attention import attention_section
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.integration.transformers.double_sparsity import NAME, sparse_rows
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.pattern import Pattern
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy

IDS = torch.arange(3, 60)[None]


def loaded(path: Path | str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def slid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slid folder whose manifest says which tokens are read: a third of them, in the second layer."""
    folder = tmp_path_factory.mktemp("sparse")
    asked = PruneOptions(6, 8, method="magnitude")
    sparsepack.prune(make_model(folder / "m", "qwen2"), folder / "pruned", asked)
    checkpoint = open_checkpoint(str(folder / "pruned"))
    channels = torch.arange(8).expand(checkpoint.config.num_key_value_heads, -1)
    policy = TokenPolicy(Fraction(1, 3), sinks=1, recent=2, min_context=4)
    heads = heads_of_config(checkpoint.config)
    attention = SparseAttention(policy, (None, *[channels] * (checkpoint.layers - 1)))
    section = attention_section(attention, heads, "0" * 64)
    request = PlanRequest(pattern=Pattern(6, 8), attention=section)
    FORMATS["slide-bf16"].plan(checkpoint, request).write(folder / "slid")
    return folder / "slid"


def test_sparse_attention_in_its_manifest_is_attached_when_it_is_loaded(slid: Path) -> None:
    model = loaded(slid)
    ids = IDS[:1].repeat(1, 3)
    with torch.inference_mode():
        dense = model(ids).logits
        with sparse_rows(torch.tensor([ids.shape[1] // 2])):
            sparse = model(ids).logits
        assert not torch.allclose(sparse, dense, atol=1e-2)
        past = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=past, use_cache=True).logits[0, -1]
        assert not torch.allclose(last, dense[0, -1], atol=1e-2)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(ids).logits, dense)
    made = loaded(slid).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, ids.shape[1] + 4)


def test_eval_measures_its_sparse_attention(slid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:3000])
    asked = {"perplexity": (str(tmp_path / "text.txt"),), "context": 64, "windows": 2}
    result = evaluate(EvalRequest(str(slid), **asked))
    assert result["protocol"] == "decode"
    assert result["perplexity"][0]["tokens_read"]["of_sparse_layers"] == pytest.approx(1 / 3, abs=0.03)


def attached(model: Any) -> bool:
    return bool(model.config._attn_implementation == NAME)


def test_who_asks_for_another_attention_gets_it_and_is_told(slid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = loaded(slid, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert "attention is dense, as attn_implementation 'eager' is" in capsys.readouterr().err
    loaded(slid)
    assert "dense" not in capsys.readouterr().err


def test_it_may_be_asked_for_by_name(slid: Path) -> None:
    model, default = loaded(slid, attn_implementation=NAME), loaded(slid)
    ids = IDS.repeat(1, 3)
    with torch.inference_mode(), sparse_rows(torch.tensor([20])):
        assert torch.equal(model(ids).logits, default(ids).logits)


def test_a_subfolder_is_loaded_with_its_attention(slid: Path, tmp_path: Path) -> None:
    shutil.copytree(slid, tmp_path / "sub")
    assert attached(loaded(tmp_path, subfolder="sub"))


def test_a_subfolder_in_the_cache_of_a_hub_is_too(slid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, commit = tmp_path / "models--we--m", "0123456789" * 4
    shutil.copytree(slid, repository / "snapshots" / commit / "sub")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert attached(loaded("we/m", subfolder="sub", cache_dir=tmp_path, local_files_only=True))


def test_a_copy_without_its_manifest_says_that_it_is_dense(
    slid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded(slid).save_pretrained(tmp_path / "copy")
    assert capsys.readouterr().err.count("attention is dense") == 0
    model = loaded(tmp_path / "copy")
    assert not attached(model)
    assert "attention is dense: sparsepack.json, which says how it is sparse, is missing" in capsys.readouterr().err
    assert torch.isfinite(model(IDS).logits).all()
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    del config["quantization_config"]["attention"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    assert not attached(loaded(tmp_path / "copy"))
    assert "dense" not in capsys.readouterr().err
