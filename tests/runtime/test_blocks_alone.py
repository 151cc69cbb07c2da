"""Nemotron-H: blocks that are a state-space model, attention or an MLP alone, here without mixtures of experts."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend_that, largest_difference
from model_table import NEMOTRON_H
from models_for_tests import edit_config, make_model
from packed_models import random_model, stock_logits, stock_model, with_rules

from sparsepack.errors import CheckpointError, UserError
from sparsepack.formats.packed import PackedLayer, PackedModel
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import Attention, Mamba
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.backends import ALONE
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_divides

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
KINDS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
able = every_backend_that(lambda row: ALONE in row.traits)


@cache
def models() -> tuple[PackedModel, Any]:
    sizes = {"mamba_num_heads": 10, "mamba_head_dim": 36, "n_groups": 5, "ssm_state_size": 20, "conv_kernel": 2}
    packed = random_model(**{**NEMOTRON_H, **sizes, "layers_block_type": KINDS, "intermediate_size": 172})
    stock = stock_model(packed)
    return with_rules(packed, stock, IDS, [0, 6]), stock


def test_each_block_has_one_part() -> None:
    a = models()[0].architecture
    assert [type(block.mixer) for block in a.blocks] == [Mamba, type(None), Mamba, Attention, type(None)]
    assert [block.mlp is None for block in a.blocks] == [True, False, True, True, False]
    assert (a.experts, a.mlp_layers, a.mamba_layers, a.attention_layers) == (None, (1, 4), (0, 2), (3,))
    assert Architecture.from_json(a.to_json()) == a


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_layers": ()},
        {"mlp_layers": (0, 1)},
        {"mlp_layers": (1, 5)},
        {"mamba_layers": ()},
        {"mamba_layers": (0, 2, 3)},
        {"mamba": Mamba(10, 36, 4, 20, 2, 5)},
        {"mamba": Mamba(10, 36, 5, 20, 0, 5)},
    ],
    ids=str,
)
def test_numbers_of_no_model_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"mlp_layers|mamba|heads|no layer has attention"):
        check_numbers(dataclasses.replace(models()[0].architecture, **changes))


def test_steps_have_no_least_size() -> None:
    """As in the makers' code, where transformers takes `time_step_min`: what remembers long would forget."""
    packed = models()[0]

    def with_small_steps(layer: PackedLayer) -> PackedLayer:
        shifts = {"mamba_dt_bias": -8.0, "mamba_a_log": 3.0}
        return dataclasses.replace(layer, delta_net={k: v + shifts.get(k, 0.0) for k, v in layer.delta_net.items()})

    small = dataclasses.replace(packed, layers=tuple(map(with_small_steps, packed.layers)))
    expected, _ = stock_logits(stock_model(small), small, IDS, len(IDS))
    found = Engine(small, backend="reference", context=16).teacher_forced(IDS, len(IDS))
    assert largest_difference(found, expected) < TOLERANCE["reference"]


def test_no_part_of_them_lies_in_the_hosts_memory() -> None:
    packed = random_model(**{**NEMOTRON_H, "layers_block_type": ["full_attention", "mlp"]})
    with pytest.raises(UserError, match="vram: models whose blocks are attention or an MLP alone are not divided"):
        check_divides(packed)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("nemotron_h", {}), ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]})],
)
def test_bounds_of_steps_are_refused(tmp_path: Path, family: str, kinds: dict[str, Any]) -> None:
    folder = make_model(tmp_path / "m", family)
    edit_config(folder, time_step_limit=[0.0, 0.1], **kinds)
    with pytest.raises(CheckpointError, match=r"time_step_limit is .0\.0, 0\.1.; expected \[0\.0, inf\]"):
        open_checkpoint(folder)


@able
@pytest.mark.parametrize("start", [0, 6, len(IDS)])
def test_logits_are_the_stock_models(backend: str, start: int) -> None:
    packed, stock = models()
    expected, _ = stock_logits(stock, packed, IDS, start)
    engine = engine_of(packed, backend)
    assert largest_difference(engine.teacher_forced(IDS, start), expected) < TOLERANCE[backend]
    engine.reset()
    if start:
        engine.prefill(IDS[:start])
    for id, row in zip(IDS[start:], expected[start:], strict=True):
        assert largest_difference(engine.step(id), row) < TOLERANCE[backend]


@able
def test_several_texts_have_what_each_has_alone(backend: str) -> None:
    packed, _ = models()
    texts = [IDS[:4], IDS[3:9], IDS[8:]]
    together, alone = engine_of(packed, backend, sequences=3, dense=True), engine_of(packed, backend, dense=True)
    for number, text in enumerate(texts):
        together.prefill(text, number)
    found = together.step_all([7, 11, 13])
    for number, text in enumerate(texts):
        alone.reset()
        alone.prefill(text)
        assert largest_difference(found[number], alone.step([7, 11, 13][number])) < TOLERANCE[backend]
