"""Small models of every family, made once."""

from pathlib import Path

import pytest
from artifacts_for_tests import write_zigzag
from models_for_tests import AS_LLAMA_CPP, LLAMA_CPP, SMALL, make_model
from small_rules import rules

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint

ODD = {"intermediate_size": 300, "num_key_value_heads": 1, "attention_bias": True}
"""Widths that are no multiples of 256, and biases at q, k, v and o."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One small random checkpoint per family, and `odd`: a Llama of widths that zigzag must pad."""
    folder = tmp_path_factory.mktemp("models")
    folders = {family: make_model(folder / family, family) for family in SMALL}
    folders["odd"] = make_model(folder / "odd", "llama", **ODD)
    return {name: open_checkpoint(path) for name, path in folders.items()}


@pytest.fixture(scope="session")
def llama_cpp_checkpoints(
    checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Checkpoint]:
    """One small random checkpoint per family that llama.cpp knows, as it takes them."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        family: open_checkpoint(make_model(folder / family, family, **AS_LLAMA_CPP[family]))
        for family in LLAMA_CPP
        if family in AS_LLAMA_CPP
    }
    return {family: made.get(family, checkpoints[family]) for family in LLAMA_CPP}


@pytest.fixture(scope="session")
def zigzag_files(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint as a zigzag GGUF, one site sparse by a number, one by a vector with offsets."""
    folder = tmp_path_factory.mktemp("zigzag")
    for name, checkpoint in checkpoints.items():
        write_zigzag(checkpoint, rules(checkpoint), folder / f"{name}.gguf")
    return {name: folder / f"{name}.gguf" for name in checkpoints}


@pytest.fixture(scope="session")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2, of whose inputs 6 of 8 have weights; not to be changed."""
    folder = tmp_path_factory.mktemp("pruned")
    sparsepack.prune(make_model(folder / "m", "qwen2"), folder / "pruned", PruneOptions(6, 8, method="magnitude"))
    return folder / "pruned"
