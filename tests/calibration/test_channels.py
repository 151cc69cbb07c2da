"""The importance of attention channels: against a plain computation, of every family, and heads that stay apart."""

import shutil
from dataclasses import replace

import pytest
import torch
from attention_pairs import all_pairs
from models_for_tests import make_model
from safetensors.torch import load_file, save_file

from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.statistics import importance
from sparsepack.errors import CalibrationError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.model import load_model

OPTIONS = CalibrateOptions(context=40, samples=5, sinks=3)
MODELS = {
    "llama": {},
    "llama, a head each": {"num_key_value_heads": 4},
    "mistral, sliding window": {"sliding_window": 16},
    "qwen2": {},
    "qwen2, every second layer slides": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {},
    "qwen3, one KV head": {"num_key_value_heads": 1, "head_dim": 32},
}


def _model(path, name):
    return open_checkpoint(make_model(path, name.split(",")[0], **MODELS[name]))


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [B, heads, S, D], channel c with channel c + D / 2: float64."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    one, other = x.double().split(half, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def _plain(checkpoint, windows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Query and key of each layer [B, heads, S, D], from the whole model's projections, or the norms behind them."""
    model, seen = load_model(checkpoint), {}
    for layer, block in enumerate(model.model.layers):
        attention = block.self_attn
        for name in "qk":
            source = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")

            def keep(_, __, output, at=(layer, name), channels=attention.head_dim):
                heads = output if output.ndim == 4 else output.unflatten(-1, (-1, channels))
                seen[at] = heads.transpose(1, 2)

            source.register_forward_hook(keep)
    with torch.inference_mode():
        model.model(windows.long())
    theta = checkpoint.config.rope_parameters["rope_theta"]
    return [tuple(_rotated(seen[n, name], theta) for name in "qk") for n in range(checkpoint.layers)]


def _windows_of(config) -> list[int]:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [(getattr(config, "sliding_window", None) or 0) if "sliding" in kind else 0 for kind in kinds]


@pytest.mark.parametrize("name", MODELS)
def test_importance_is_that_of_the_stock_models_queries_and_keys(tmp_path, text, name):
    checkpoint = _model(tmp_path / "m", name)
    made = calibrate(checkpoint, text, tmp_path / "c", OPTIONS)
    assert made.manifest["tokens"]["windows"] == 5, "the last batch is smaller"
    sliding = _windows_of(checkpoint.config)
    assert any(sliding) == ("slid" in name)
    for found, (query, key), window in zip(importance(made), _plain(checkpoint, made.windows), sliding, strict=True):
        query, key = query[:, :, 3:], key[:, :, 3:]
        by_head, group = query.abs().sum((0, 2)), query.shape[1] // key.shape[1]
        expected = torch.stack([heads.mean(0) for heads in by_head.split(group)])
        torch.testing.assert_close(found.query, expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.key, key.abs().sum((0, 2)), rtol=1e-4, atol=0)
        torch.testing.assert_close(found.product, all_pairs(query, key, window), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_manifest_names_heads_and_rotary_convention(tmp_path, text, name):
    checkpoint = _model(tmp_path / "m", name)
    made = calibrate(checkpoint, text, tmp_path / "c", OPTIONS)
    channels = 128 if name == "qwen3" else 64  # 128 is not the width by the heads
    rotary = {"convention": "half-split", "dims": channels}
    expected = {"heads": 4, "kv_heads": 2, "head_dim": channels, "groups": "mean", "rotary": rotary}
    assert made.manifest["attention"] == expected


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_the_batch_size_changes_nothing(small, text, tmp_path, batch):
    made = [
        calibrate(small, text, tmp_path / str(n), replace(OPTIONS, batch=size)) for n, size in enumerate((2, batch))
    ]
    for ours, theirs in zip(*map(importance, made), strict=True):
        for one, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


def _with_heads_in_order(model, path, kv_heads, order):
    """The model with its KV heads in another order, each with its group of query heads: the same function."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    for name, value in tensors.items():
        if any(f"{projection}_proj" in name for projection in "qkv"):
            tensors[name] = value.unflatten(0, (kv_heads, -1))[order].flatten(0, 1).contiguous()
        elif "o_proj" in name:
            tensors[name] = value.unflatten(1, (kv_heads, -1))[:, order].flatten(1, 2).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_heads_in_another_order_have_their_channels_in_that_order(tmp_path, text, family):
    model = make_model(tmp_path / "m", family, num_attention_heads=8, num_key_value_heads=4)
    order = [2, 0, 3, 1]
    models = (model, _with_heads_in_order(model, tmp_path / "other", 4, order))
    made = [calibrate(open_checkpoint(path), text, tmp_path / f"c{n}", OPTIONS) for n, path in enumerate(models)]
    for ours, theirs in zip(*map(importance, made), strict=True):
        for one, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            assert not torch.allclose(one, other, rtol=1e-2)
            torch.testing.assert_close(one[order], other, rtol=1e-3, atol=0)


def test_two_with_products_are_merged_with_them(small_calibration, tmp_path, capfd):
    other = replace(small_calibration, manifest={**small_calibration.manifest, "parts": ["other"]})
    merged = folder.merge(small_calibration, other)
    assert not capfd.readouterr().err
    assert merged.manifest["attention"] == small_calibration.manifest["attention"]
    product = "attention.product_abs"
    assert torch.equal(merged.layers[2][product], 2 * small_calibration.layers[2][product])


def _changed(calibration, **changes):
    return replace(calibration, manifest={**calibration.manifest, "attention": changes})


def test_heads_that_the_statistics_are_not_of_are_refused(small_calibration, tmp_path):
    right = small_calibration.manifest["attention"]
    *others, last = small_calibration.layers
    without = {name: value for name, value in last.items() if name != "attention.product_abs"}
    damaged = {
        r"attention\.key_abs is \[2, 64\], expected \[4, 64\]": _changed(small_calibration, **{**right, "kv_heads": 4}),
        r"query_abs is \[4, 64\], expected \[4, 32\]": _changed(small_calibration, **{**right, "head_dim": 32}),
        "4 query heads for 3 KV heads": _changed(small_calibration, **{**right, "kv_heads": 3}),
        r"attention\.groups: Input should be 'mean'": _changed(small_calibration, **{**right, "groups": "max"}),
        r"attention\.rotary\.convention": _changed(
            small_calibration, **{**right, "rotary": {"convention": "x", "dims": 1}}
        ),
        r"product_abs": replace(small_calibration, layers=(*others, without)),
        "attention: Field required": replace(small_calibration, manifest={**small_calibration.manifest}),
    }
    del damaged["attention: Field required"].manifest["attention"]
    for message, calibration in damaged.items():
        folder.save(calibration, tmp_path / "c", overwrite=True)
        with pytest.raises(CalibrationError, match=f"{message}.*calibrate again") as caught:
            folder.load(tmp_path / "c")
        assert "\n" not in str(caught.value)


def test_calibrations_of_other_heads_are_not_merged(small_calibration):
    right = small_calibration.manifest["attention"]
    other = _changed(small_calibration, **{**right, "rotary": {"convention": "interleaved", "dims": 64}})
    with pytest.raises(CalibrationError, match=r"cannot merge: attention is .*half-split.* in the first"):
        folder.merge(small_calibration, other)
