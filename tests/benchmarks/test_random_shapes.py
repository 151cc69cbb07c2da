"""Random models of the shapes that `cuda_decode` measures: ours, and the files that llama.cpp is timed with."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from benchmarks import cpu_shapes
from benchmarks.cpu_decode import PEER
from benchmarks.shared import shapes
from benchmarks.shared.llama_bench import peer_batches, write_shape
from benchmarks.shared.llama_cpp import LlamaCpp
from benchmarks.shared.random_models import random_of
from benchmarks.shared.shapes import MODELS, configuration
from benchmarks.shared.thresholds import find_thresholds, with_thresholds
from sparsepack.runtime.engine import Engine

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 160,
    "shared_expert_intermediate_size": 320,
}
GPT_OSS = {"head_dim": 64, "num_local_experts": 6, "num_experts_per_tok": 2}
STATES = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 128,
    "n_routed_experts": 6,
    "moe_intermediate_size": 160,
    "moe_shared_expert_intermediate_size": 320,
}
IDS = [3, 500, 17, 4, 90]


def small(name: str) -> Any:
    changes: dict[str, Any] = {**SMALL, **(EXPERTS if "num_experts" in MODELS[name] else {})}
    if "linear_num_key_heads" in MODELS[name]:
        changes |= STATES
    if name == "gemma-4-26b-a4b":
        changes |= {"num_global_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "intermediate_size": 480}
        changes |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    if name == "nemotron-3-nano-30b-a3b":
        return configuration(name, **{**SMALL, **NEMOTRON_H, "num_experts_per_tok": 2})
    if name == "lfm2-1.2b":
        changes |= {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
    return configuration(name, **changes, **(GPT_OSS if name == "gpt-oss-20b" else {}))


@pytest.mark.parametrize(
    "name",
    [
        "gemma-3-1b",
        "olmoe-1b-7b",
        "qwen1.5-moe-a2.7b",
        "qwen3.5-0.8b",
        "qwen3.6-35b-a3b",
        "gpt-oss-20b",
        "lfm2-1.2b",
        "nemotron-3-nano-30b-a3b",
        "gemma-4-26b-a4b",
    ],
)
def test_thresholds_leave_half_of_the_inputs_of_each_site(name: str) -> None:
    packed = random_of(small(name), name, 1, "cpu")
    (found,) = find_thresholds(packed, [0.5]).values()
    engine = Engine(with_thresholds(packed, found), backend="reference")
    engine.teacher_forced(torch.randint(512, (30,), generator=torch.Generator().manual_seed(5)).tolist(), 0)
    activity = engine.activity()
    assert set(activity) == set(found)
    for (layer, site), share in activity.items():
        # What attention leaves is smaller where it adds up more positions, as those are that thresholds are found with.
        assert share == pytest.approx(0.5, abs=0.3 if site == "attn_out" else 0.1), (layer, site)


def test_inputs_of_each_layer_reach_the_logits() -> None:
    changes = {"num_global_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "enable_moe_block": False}
    changes |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    changes |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512}
    packed = random_of(configuration("gemma-4-26b-a4b", **{**SMALL, **changes}), "e2b", 4, "cpu")
    (found,) = find_thresholds(packed, [0.5]).values()
    models = with_thresholds(packed, found), replace(packed, per_layer=replace(packed.per_layer, norm=torch.zeros(32)))
    one, other = (Engine(of, backend="reference", dense=True).teacher_forced(IDS, 0) for of in models)
    assert one.isfinite().all()
    assert not torch.allclose(one, other, atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_runs_the_file(name: str, tmp_path: Path) -> None:
    peer = LlamaCpp(write_shape(tmp_path / "peer.gguf", small(name)), 64, repacked=False)
    found = []
    for id in IDS:
        peer.decode([id])
        found.append(peer.logits())
    peer.close()
    logits = torch.stack(found)
    assert logits.shape == (len(IDS), 512)
    assert logits.isfinite().all()
    assert len({int(row.argmax()) for row in logits}) > 1


def test_a_program_of_llama_cpp_is_asked_for_several_texts_and_told_once_where_the_file_is(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    rows = "".join(f'echo \'{{"pl": {n}, "speed_tg": {100.5 * n}}}\'\n' for n in (2, 4))
    program.write_text(f"#!/bin/sh\ntest -f $2 || exit 1\necho $@ > {tmp_path}/asked\necho noise\n{rows}")
    program.chmod(0o755)
    assert peer_batches(program, small("gemma-3-1b"), tmp_path, 16, 8, (2, 4), "cpu") == {2: 201.0, 4: 402.0}
    assert "-c 96 -npp 16 -ntg 8 -npl 2,4" in (tmp_path / "asked").read_text()
    assert not (tmp_path / "peer.gguf").exists()


def test_a_table_has_each_side_of_one_run(tmp_path: Path) -> None:
    changed = {"qwen3.5-0.8b": {**MODELS["qwen3.5-0.8b"], **SMALL, **STATES, "head_dim": 64}}
    options = ["--work", str(tmp_path), "--rounds", "1", "--threads", "1", "--json", str(tmp_path / "figures.json")]
    with (
        patch.object(shapes, "MODELS", changed),
        patch.object(cpu_shapes, "PROMPT", 8),
        patch.object(cpu_shapes, "NEW", 4),
        patch.object(cpu_shapes, "LlamaCpp", partial(LlamaCpp, repacked=False)),  # else not every machine runs it
    ):
        done = CliRunner().invoke(cpu_shapes.main, options)
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {side: len(each) for side, each in figures["speeds"].items()} == dict.fromkeys((PEER, *cpu_shapes.SIDES), 1)
    assert 0.3 < float(figures["skipped"]["ours, half skipped"].rstrip("%")) / 100 < 0.7
    assert not list(tmp_path.glob("*.gguf"))
