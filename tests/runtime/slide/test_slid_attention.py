"""A slid folder with sparse attention: what transformers and `eval` make of it."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import TEXT, make_model

import sparsepack
from sparsepack.artifacts.attention import attention_section
from sparsepack.artifacts.formats import FORMATS
from sparsepack.artifacts.plan import PlanRequest
from sparsepack.codecs.pattern import Pattern
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.models.checkpoint import open_checkpoint
from sparsepack.models.heads import heads_of_config
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.prune.options import PruneOptions
from sparsepack.runtime.double.attention import sparse_rows

IDS = torch.arange(3, 60)[None]


def loaded(path: Path, **options: Any) -> Any:
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


def test_who_asks_for_another_attention_gets_it(slid: Path) -> None:
    model = loaded(slid, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
