"""Second moments of what attention heads give, for each KV head."""

from dataclasses import replace

import pytest
import torch
from models_for_tests import OPT, make_opt

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.collectors import OUTPUTS
from sparsepack.calibrate.folder import OUTPUT_PRODUCT
from sparsepack.calibrate.statistics import output_moments
from sparsepack.errors import CalibrationError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model


def test_the_moments_are_those_of_what_enters_o(small, small_calibration):
    heads, sinks = heads_of_config(small.config), small_calibration.manifest["tokens"]["sinks"]
    seen = {}
    model = load_model(small)
    with (
        torch.inference_mode(),
        site_hooks(
            list(enumerate(backbone_of(model).layers)),
            small.family,
            lambda layer, site, x: seen.update({(layer, site): x}),
        ),
    ):
        model.base_model(small_calibration.windows.long(), use_cache=False)
    moments = output_moments(small_calibration)
    assert len(moments) == small.layers
    group = heads.heads // heads.kv_heads
    for layer, found in enumerate(moments):
        outputs = seen[layer, "attn_out"][:, sinks:].double()
        for head in range(heads.kv_heads):
            columns = slice(head * group * heads.head_dim, (head + 1) * group * heads.head_dim)
            each = outputs[..., columns].reshape(-1, heads.head_dim)
            torch.testing.assert_close(found[head], each.t() @ each / len(each), rtol=1e-4, atol=1e-6)


def test_parts_add_up():
    x = torch.randn(4, 9, 24, generator=torch.Generator().manual_seed(0))
    (whole,), *parts = (OUTPUTS.count(part, 2, 4) for part in (x, x[:1], x[1:]))
    torch.testing.assert_close(OUTPUTS.add(parts[0][0], parts[1][0]), whole, rtol=1e-5, atol=1e-4)
    assert (whole.dtype, whole.shape) == (torch.float64, (2, 4, 4))


def test_a_calibration_from_before_has_none(small_calibration, tmp_path):
    layers = tuple({n: v for n, v in layer.items() if n != OUTPUT_PRODUCT} for layer in small_calibration.layers)
    before = folder.save(replace(small_calibration, layers=layers), tmp_path / "c")
    assert output_moments(folder.load(tmp_path / "c")) is None
    other = replace(small_calibration, manifest={**small_calibration.manifest, "parts": ["other"]})
    with pytest.raises(CalibrationError, match="one was made by a sparsepack that counted less; calibrate again"):
        folder.merge(before, other)


def test_a_block_without_them_is_damaged(small_calibration, tmp_path):
    *others, last = small_calibration.layers
    without = {name: value for name, value in last.items() if name != OUTPUT_PRODUCT}
    folder.save(replace(small_calibration, layers=(*others, without)), tmp_path / "c")
    with pytest.raises(CalibrationError, match=r"output_product is .*expected \[2, 64, 64\] in each of 3 blocks"):
        folder.load(tmp_path / "c")


def test_a_model_that_cannot_be_rotated_has_none(text, tmp_path):
    model = open_checkpoint(make_opt(tmp_path / "m", **OPT[next(iter(OPT))]))
    made = calibrate(model, text, tmp_path / "c", CalibrateOptions(context=32, samples=2))
    assert output_moments(made) is None
