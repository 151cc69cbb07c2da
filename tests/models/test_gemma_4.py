"""Gemma 4: what layers without a window have of their own, and which models are measured or refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from models_for_tests import make_model

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture, check_numbers
from sparsepack.models.blocks import Attention
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import check_taken

MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", "gemma4_text"))


def test_layers_without_a_window_have_heads_of_their_own(checkpoint: Checkpoint) -> None:
    mixers = [block.mixer for block in checkpoint.architecture.blocks]
    assert [(m.kv_heads, m.head_dim, m.k_eq_v) for m in mixers if isinstance(m, Attention)] == [
        (2, 48, False),
        (2, 48, False),
        (1, 96, True),
    ]
    assert all(block.scaled for block in checkpoint.architecture.blocks)
    assert [len(checkpoint.projections(layer, "attn_in")) for layer in range(3)] == [3, 3, 2]


def test_its_numbers_come_back_from_a_file(checkpoint: Checkpoint) -> None:
    architecture = checkpoint.architecture
    check_numbers(architecture)
    assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize(
    "changes",
    [{"global_heads": (3, 96)}, {"global_heads": (1, 90)}, {"global_heads": (1,)}, {"k_eq_v": 1}],
    ids=["heads that do not divide", "too few channels", "one number", "no boolean"],
)
def test_numbers_of_no_model_are_refused(checkpoint: Checkpoint, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads|k_eq_v"):
        check_numbers(dataclasses.replace(checkpoint.architecture, **changes))


def test_a_mixture_is_measured_without_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = open_checkpoint(make_model(tmp_path / "m", "gemma4_text", **MIXTURE))
    assert not found.family.has_row
    assert "measured, not run by our engines" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="gemma4_text models whose enable_moe_block is not False have no row"):
        check_taken("pack", found.family, "m")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512},
        {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ],
    ids=["embeddings of each layer", "shared keys and values"],
)
def test_what_nothing_computes_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_model(tmp_path / "m", "gemma4_text", **changes)
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))} is .*; expected 0, all that is computed here"):
        open_checkpoint(folder)
