"""Decoders on GPUs of a kind that nobody has tried: steps that agree with a prompt are let through, others are not."""

from functools import cache, partial
from typing import Any

import pytest
import simulated
import simulated_between as between
import simulated_products as products
import torch
from backends import skip_lacking
from model_table import VARIANTS
from packed_models import by_neurons, random_model, stock_model, with_rules
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda import backend
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.decoder.self_check import LIMIT, TOKENS, check_decoder, check_unknown
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.options import EngineOptions

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1))
AMPERE = "NVIDIA A100"


@cache
def model(variant: str = "llama") -> PackedModel:
    packed = random_model(variant)
    skip_lacking("cuda", packed)
    return with_rules(packed, stock_model(packed), IDS.tolist(), [0, 6])


def decoder(kernels: Kernels, packed: PackedModel, sequences: int = 1, context: int = 64) -> CudaDecoder:
    return CudaDecoder(packed, torch.device("cuda"), context, sequences, "f32", kernels)


class Untried(simulated.SimulatedKernels):
    """A GPU of a kind that is not known."""

    capability = staticmethod(lambda device: (8, 0))
    device_name = staticmethod(lambda device: AMPERE)


class LacksRows(Untried):
    """Products that skip leave out every second query, key and value."""

    @staticmethod
    def gemv(matrix: Any, input: Any, output: Any) -> None:
        products.gemv(matrix, input, output)
        if input.threshold is not None and input.norm is not None and output.activation is None:
            output.y[::2] = 0


class LooksAtItself(Untried):
    """Attention sees the new token alone."""

    @staticmethod
    def attend(parameters: Any, qkv: Tensor, positions: Tensor, out: Tensor, **how: Any) -> None:
        for n, here in enumerate(positions.tolist()):
            parameters.keys[n, :, :here] = 0
            parameters.values[n, :, :here] = 0
        between.attend(parameters, qkv, positions, out, **how)


class GivesNoNumbers(Untried):
    """Steps end with a logit that is none."""

    @staticmethod
    def product(matrix: Any, x: Tensor, y: Tensor, *of: Any, **how: Any) -> None:
        products.product(matrix, x, y, *of, **how)
        y[..., 0] = torch.nan


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_that_computes_right_is_let_through_and_is_as_new(variant: str, kernels: Kernels) -> None:
    packed = model(variant)
    checked, new = decoder(kernels, packed), decoder(kernels, packed)
    assert any(bool(limit.any()) for limit in new.thresholds()) or not new.thresholds()
    assert check_decoder(checked, "GPU") < LIMIT / 3
    assert checked.stepped == 0
    assert not any(checked.active().values())
    for each in (checked, new):
        each.prefill(0, IDS[:4])
    for id in IDS[4:].tolist():
        assert torch.equal(checked.step([id], True), new.step([id], True))
    assert checked.active() == new.active()


@pytest.mark.parametrize("sequences", [1, 3])
def test_several_sequences_and_neurons_are_compared_too(sequences: int, kernels: Kernels) -> None:
    neurons = by_neurons(random_model("llama", hidden_size=256, hidden_act="relu"))
    for packed in (model(), neurons):
        of = decoder(kernels, packed, sequences)
        assert (of.thresholds() == []) == (packed is neurons)
        assert check_decoder(of, "GPU") < LIMIT / 3


@pytest.mark.parametrize("context", [1, 2, TOKENS - 1])
def test_a_short_context_is_enough(context: int, kernels: Kernels) -> None:
    of = decoder(kernels, model(), context=context)
    assert check_decoder(of, "GPU") < LIMIT / 3
    assert len(of.prefill(0, IDS[:context])) == of.vocabulary


@pytest.mark.parametrize(
    ("wrong", "named"), [(LacksRows, "skipping columns"), (LooksAtItself, "dense"), (GivesNoNumbers, "dense")]
)
@pytest.mark.usefixtures("simulated_launches")
def test_one_that_computes_something_else_is_refused_by_a_line(wrong: type[Kernels], named: str) -> None:
    of = decoder(wrong(), model())
    before = [limit.clone() for limit in of.thresholds()]
    with pytest.raises(
        UserError, match=rf"{AMPERE}, compute capability 8.0: steps \({named}\) and a prompt"
    ) as refused:
        check_unknown(of)
    assert "\n" not in str(refused.value)
    assert all(limit.all() for limit in before)
    assert all(map(torch.equal, of.thresholds(), before)), "thresholds are those of the model again"


@pytest.mark.usefixtures("simulated_launches")
def test_engines_check_what_is_not_known_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(sequences=1)
    for kernels, checked in ((simulated.KERNELS, False), (Untried(), True)):
        monkeypatch.setattr(backend, "CudaDecoder", partial(CudaDecoder, kernels=kernels))
        found = backend.decoder(model(), torch.device("cuda"), 64, "f32", options)
        assert (len(found._steps) > 0) == checked
        said = capsys.readouterr().err
        assert (f"{AMPERE}, compute capability 8.0: these kernels have not been run" in said) == checked


@pytest.mark.gpu
def test_this_gpu_is_known_or_is_checked() -> None:
    of = decoder(KERNELS, model())
    assert (check_unknown(of) is None) == (of.capability == (9, 0))
