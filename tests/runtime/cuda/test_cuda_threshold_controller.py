"""A held share on a GPU, and by kernels in plain torch: what graphs and steps that run ahead could do to it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from packed_models import random_model, stock_model, with_rules
from torch import Tensor
from zigzag_cases import CONFIGS, loaded, normal, random_matrix

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.decoder.step_end import new_cuda_controller, pick_likeliest
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, batch, gemv, most_inputs
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.threshold_controller import SequenceScale, ThresholdController, new_controller

TEXTS = torch.randint(300, (4, 40), generator=torch.Generator().manual_seed(5)).tolist()
INTERLEAVED = "gate and up in one product"
BLOCKS = {"hidden_size": 128, "intermediate_size": 768, "attention_bias": True, "mlp_bias": True}
every_variant = pytest.mark.parametrize("variant", ["llama", "qwen3, tied", INTERLEAVED])
FLIPPED = 2e-3
"""Of a scale, where rounding decides about a column or two."""


@cache
def model(variant: str = "llama") -> PackedModel:
    packed = random_model("llama", **BLOCKS) if variant == INTERLEAVED else random_model(variant)
    packed = with_rules(packed, stock_model(packed), TEXTS[0][:13], [0, 6, 12])
    return PackedModel(**{**vars(packed), "manifest": {**packed.manifest, "thresholds": {"sparsity": 0.6}}})


def held_decoder(kernels: Kernels, variant: str = "llama", sequences: int = 1, context: int = 64) -> CudaDecoder:
    decoder = CudaDecoder(model(variant), torch.device("cuda"), context, sequences, "f32", kernels)
    decoder.control_thresholds(new_controller(model(variant)))
    return decoder


def oracle(variant: str = "llama", sequences: int = 1) -> Engine:
    return Engine(model(variant), backend="reference", sequences=sequences, hold=True)


def weights_skipped(variant: str, counts: dict[tuple[int, str], int], before: dict[tuple[int, str], int]) -> int:
    packed = model(variant)
    matrices = {key: packed.layers[key[0]].sites[key[1]].matrix for key in packed.rules}
    return sum(m.rows * (m.columns - counts[key] + before.get(key, 0)) for key, m in matrices.items())


@every_variant
def test_the_scale_follows_from_what_each_step_skipped(variant: str, kernels: Kernels) -> None:
    decoder, reference, controller, text = (
        held_decoder(kernels, variant),
        oracle(variant),
        new_controller(model(variant)),
        SequenceScale(),
    )
    for id in TEXTS[1][:24]:
        before = decoder.active()
        decoder.step([id], True)
        reference.step(id)
        text = controller.after(text, weights_skipped(variant, decoder.active(), before))
        assert decoder.scales[0] == pytest.approx(text.scale, abs=1e-6)
        assert decoder.scales[0] == pytest.approx(reference.scales[0], abs=FLIPPED)
    assert text.scale > 1.05
    assert not decoder._step.controller.skipped.any()


@every_variant
def test_each_sequence_of_several_is_held_for_itself(variant: str, kernels: Kernels) -> None:
    decoder, reference = held_decoder(kernels, variant, 3), oracle(variant, 3)
    for step in range(16):
        reference.step_all([TEXTS[n][step] for n in range(3)])
        decoder.step([TEXTS[n][step] for n in range(3)], True)
        assert decoder.scales == pytest.approx(reference.scales, abs=FLIPPED)
    assert len(set(decoder.scales)) == 3


def test_a_sequence_that_stands_still_keeps_its_scale(kernels: Kernels) -> None:
    decoder = held_decoder(kernels, sequences=3)
    for step in range(6):
        decoder.step([TEXTS[n][step] for n in range(3)], True)
    for moving in ({0}, {1, 2}, {0, 2}, {0, 1, 2}, {1}):
        before = decoder.scales
        decoder.step([TEXTS[n][7] if n in moving else None for n in range(3)], True)
        assert {n for n in range(3) if decoder.scales[n] != before[n]} == moving
    before = decoder.scales
    decoder.truncate(1, 3)
    assert decoder.scales == (before[0], 1.0, before[2])
    decoder.reset()
    assert decoder.scales == (1.0, 1.0, 1.0)


def test_dense_steps_and_prefill_leave_the_scale(kernels: Kernels) -> None:
    decoder = held_decoder(kernels)
    for id in TEXTS[0][:6]:
        decoder.step([id], True)
    scales = decoder.scales
    decoder.step([3], False)
    decoder.prefill(0, torch.tensor(TEXTS[0][:5]))
    decoder.step([3], False)
    assert decoder.scales == scales
    decoder.step([3], True)
    assert decoder.scales != scales


AFTER: dict[str, Callable[[CudaDecoder, int], Any]] = {
    "prefill": lambda decoder, id: decoder.prefill(0, torch.tensor(TEXTS[2][:3])),
    "the token chosen": lambda decoder, id: decoder.step([id], True),
    "another token": lambda decoder, id: decoder.step([(id + 1) % 300], True),
    "dense": lambda decoder, id: decoder.step([id], False),
    "teacher-forced": lambda decoder, id: decoder.teacher_forced(torch.tensor(TEXTS[2][:13]), 4, True),
    "a shorter text": lambda decoder, id: decoder.truncate(0, 2),
    "reset": lambda decoder, id: decoder.reset(),
    "a choice without its token": lambda decoder, id: decoder.decode_next([9], True, [Sampler(Sampling())]),
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER.keys())
def test_nothing_sees_what_a_step_that_runs_ahead_holds(
    after: Callable[[CudaDecoder, int], Any], kernels: Kernels
) -> None:
    seen = []
    for ahead in (True, False):
        decoder, sampler, id = held_decoder(kernels), Sampler(Sampling()), 3
        for _ in range(6):
            if ahead:
                id = decoder.decode_next([id], True, [sampler])[0]
            else:
                id = sampler.choose(decoder.step([id], True)[0])
        scales = [decoder.scales]
        after(decoder, id)
        scales.append(decoder.scales)
        decoder.step([5], True)
        seen.append((*scales, decoder.scales))
    assert seen[0] == seen[1]
    assert seen[0][0] != (1.0,)


def test_a_step_without_a_held_share_has_the_bits_of_the_first_held_one(kernels: Kernels) -> None:
    plain = CudaDecoder(model(), torch.device("cuda"), 64, 1, "f32", kernels)
    controller = held_decoder(kernels)
    assert plain.scales == ()
    assert torch.equal(plain.step([3], True), controller.step([3], True))
    assert plain.active() == controller.active()
    assert not torch.equal(plain.step([4], True), controller.step([4], True))


@pytest.mark.gpu
def test_a_held_step_never_waits_for_the_device() -> None:
    for sequences in (1, 3):
        decoder = held_decoder(KERNELS, sequences=sequences)
        decoder.step([3] * sequences, True)  # makes the graph
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(10):
                decoder.step(
                    [TEXTS[n][step] if n != step % 2 or sequences == 1 else None for n in range(sequences)], True
                )
            decoder.truncate(0, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("workspace_is_reset")
@pytest.mark.parametrize("shape", [(256, 40), (700, 513), (300, 9001)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_product_scales_its_thresholds_and_counts_the_weights_that_it_skips(
    config: CudaTileConfig, shape: tuple[int, int]
) -> None:
    matrix, x, offset = loaded(random_matrix(*shape), config), normal(shape[1]), normal(shape[1], seed=2)
    scale, skipped = torch.tensor([1.0], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    y, expected = torch.empty(shape[0], device="cuda"), torch.empty(shape[0], device="cuda")
    for thresholds in (torch.tensor([0.6], device="cuda"), normal(shape[1], seed=3).abs()):
        for value in (1.0, 0.71, 1.4, 0.0):
            scale.fill_(value)
            skipped.zero_()
            gemv(matrix, Input(x, threshold=thresholds, offset=offset, scales=scale, skipped=skipped), Output(y))
            gemv(matrix, Input(x, threshold=scale * thresholds, offset=offset), Output(expected))
            assert torch.equal(y, expected)
            inactive = ~((x - offset).abs() > scale * thresholds)
            assert int(skipped) == shape[0] * int(inactive.sum())


@pytest.mark.gpu
@pytest.mark.usefixtures("workspace_is_reset")
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("config", "columns"),
    [(CudaTileConfig(1, 8, 24, 1), 40), (CudaTileConfig(2, 8, 16, 5), 3001), (CudaTileConfig(4, 16, 4, 2), 700)],
    ids=str,
)
def test_several_inputs_have_a_scale_and_a_count_each(config: CudaTileConfig, columns: int, inputs: int) -> None:
    rows = 1100
    matrix = loaded(random_matrix(rows, columns), config)
    if inputs > most_inputs(matrix):
        pytest.skip("more inputs than this GPU's shared memory takes")
    x, offset = normal(inputs, columns), normal(columns, seed=2)
    scales = torch.linspace(0.5, 1.5, inputs, device="cuda")
    skipped, active = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (inputs, 1))
    y = torch.empty(inputs, rows, device="cuda")
    for thresholds in (torch.tensor([1.5], device="cuda"), normal(columns, seed=3).abs()):
        skipped.zero_()
        active.zero_()
        input = Input(x, threshold=thresholds, offset=offset, scales=scales, skipped=skipped)
        batch(matrix, input, Output(y, active=active))
        each = (x - offset).abs() > scales[:, None] * thresholds
        assert int(active) == int(each.any(0).sum())
        assert skipped.tolist() == [rows * n for n in (~each).sum(1).tolist()]
        kept = torch.where(each.any(0), x - offset, 0)
        assert_near(y, kept, matrix)


def assert_near(y: Tensor, kept: Tensor, matrix: Any) -> None:
    expected = torch.empty_like(y)
    batch(matrix, Input(kept), Output(expected))
    assert (y - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.gpu
def test_the_end_of_a_step_does_what_the_record_says() -> None:
    hold, generator = ThresholdController(0.55, 10**9 + 7), torch.Generator().manual_seed(0)
    state = torch.zeros(2, 4, device="cuda")
    controller = new_cuda_controller(hold, state, "Q4_K")
    texts = [SequenceScale()] * 4
    candidates = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    ids, best = torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(4, device="cuda")
    assert controller.moving is not None
    for step in range(50):
        skipped = (torch.rand(4, generator=generator, dtype=torch.float64) * hold.weights).long()
        moving = [int((step + n) % 4 != 0) for n in range(4)]
        controller.skipped.copy_(skipped)
        controller.moving.copy_(torch.tensor(moving))
        pick_likeliest(candidates, ids, best, None, controller)
        texts = [
            hold.after(text, int(count)) if moves else text
            for text, count, moves in zip(texts, skipped, moving, strict=True)
        ]
        assert controller.scales.tolist() == pytest.approx([text.scale for text in texts], abs=1e-6)
        assert controller.steps.tolist() == [text.steps for text in texts]
        assert not controller.skipped.any()
