"""Products of the residual stream: as the stock model has it, summed over runs of blocks, kept, merged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_for_tests import make_opt

from sparsepack.calibrate import collectors as residual
from sparsepack.calibrate import folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.collectors import ends_run, run_count
from sparsepack.calibrate.folder import PRODUCT, Calibration
from sparsepack.calibrate.statistics import second_moments
from sparsepack.errors import CalibrationError
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.model import load_model
from sparsepack.workers.shard import Shard

OPTIONS = CalibrateOptions(context=32, samples=4, sinks=2)
ONE = 8 * 256**2
"""The bytes of a sum of the small model."""


def sums(calibration: Calibration) -> list[int]:
    """The blocks that have a sum."""
    return [layer for layer, statistics in enumerate(calibration.layers) if PRODUCT in statistics]


def test_sums_are_those_of_the_stock_model_before_the_norms_weights(
    small: Checkpoint, text: Text, tmp_path: Path
) -> None:
    made = calibrate(small, text, tmp_path / "c", OPTIONS)
    model, seen = load_model(small), dict[int, torch.Tensor]()

    def add(layer: int, h: torch.Tensor) -> None:
        x = h[:, 2:].double().flatten(0, 1)
        x /= x.square().mean(-1, keepdim=True).add(small.config.rms_norm_eps).sqrt()
        seen[layer] = seen.get(layer, 0) + x.t() @ x

    for layer, block in enumerate(model.model.layers):
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.register_forward_pre_hook(lambda _, inputs, layer=layer: add(layer, inputs[0]))
    with torch.inference_mode():
        model.model(made.windows.long())
    for layer in range(small.layers):
        torch.testing.assert_close(made.layers[layer][PRODUCT], seen[layer], rtol=1e-4, atol=1e-3)
    moments = second_moments(made)
    assert moments is not None
    assert [blocks for blocks, _ in moments] == [range(1), range(1, 2), range(2, 3)]
    for _, moment in moments:
        assert float(moment.trace()) == pytest.approx(256, rel=1e-3)
        assert torch.equal(moment, moment.t())


@pytest.mark.parametrize("width", [1, 3, 4, 7, 256])
def test_half_of_the_blocks_are_the_whole(width: int) -> None:
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(residual._gram(x), x.t() @ x)


def test_runs_of_blocks_fit_the_bytes_and_differ_by_one_at_most() -> None:
    assert run_count(32, 4096) == 8
    assert run_count(80, 8192) == 2
    assert run_count(8, 512) == 8
    assert run_count(120, 20480) == 1
    for layers, runs in ((32, 8), (7, 3), (5, 1), (5, 5)):
        ends = [layer for layer in range(layers) if ends_run(layer, layers, runs)]
        lengths = [last - first for first, last in zip([-1, *ends], ends, strict=False)]
        assert (len(ends), ends[-1], sum(lengths)) == (runs, layers - 1, layers)
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("runs", "blocks"), [(1, [2]), (2, [1, 2])])
def test_blocks_of_a_run_share_a_sum(
    runs: int, blocks: list[int], small: Checkpoint, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = calibrate(small, text, tmp_path / "apart", OPTIONS)
    monkeypatch.setattr(residual, "MOST_BYTES", runs * ONE)
    made = calibrate(small, text, tmp_path / "c", OPTIONS)
    assert (sums(made), made.manifest["residual"]) == (blocks, {"runs": runs, "norms": 2})
    whole, parts = (sum(layer[PRODUCT] for layer in each.layers if PRODUCT in layer) for each in (made, apart))
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-9)
    read = folder.load(tmp_path / "c")
    assert [blocks for blocks, _ in second_moments(read) or []] == [range(3)] if runs == 1 else [range(2), range(2, 3)]
    for one, other in zip(made.layers, apart.layers, strict=True):
        assert one.keys() | {PRODUCT} == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one if name != PRODUCT)


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_run_that_was_killed_within_a_run_of_blocks_ends_the_same(
    killed: int, small: Checkpoint, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "MOST_BYTES", ONE)
    calibrate(small, text, tmp_path / "whole", OPTIONS)
    save = Shard.save_block

    def dies(self: Shard, layer: int, *rest: object) -> None:
        save(self, layer, *rest)
        if layer == killed:
            raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(Shard, "save_block", dies)
        with pytest.raises(KeyboardInterrupt):
            calibrate(small, text, tmp_path / "c", OPTIONS)
    unfinished = sorted(path.name for path in (tmp_path / ".c.unfinished").glob("run-*"))
    assert unfinished == ([] if killed == 2 else [f"run-{killed + 1:05}.safetensors"])
    calibrate(small, text, tmp_path / "c", OPTIONS)
    for name in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_merged_calibrations_add_up_and_one_from_before_does_not_fit(
    small: Checkpoint, text: Text, tmp_path: Path
) -> None:
    one = calibrate(small, text, tmp_path / "one", OPTIONS)
    other = calibrate(small, replace(text, sha256="again"), tmp_path / "other", replace(OPTIONS, seed=1))
    both = folder.merge(one, other)
    for layer in range(3):
        assert torch.equal(both.layers[layer][PRODUCT], one.layers[layer][PRODUCT] + other.layers[layer][PRODUCT])
    moments = [second_moments(each) for each in (one, other, both)]
    torch.testing.assert_close(moments[2][1][1], (moments[0][1][1] + moments[1][1][1]) / 2)  # type: ignore[index]
    layers = tuple({name: value for name, value in layer.items() if name != PRODUCT} for layer in one.layers)
    manifest = {name: value for name, value in one.manifest.items() if name != "residual"}
    before = folder.save(replace(one, manifest=manifest, layers=layers), tmp_path / "before")
    assert second_moments(folder.load(tmp_path / "before")) is None
    for pair in ((before, other), (other, before)):
        with pytest.raises(CalibrationError, match=r"cannot merge: residual is .*runs.* in the"):
            folder.merge(*pair)
    twice = calibrate(small, replace(text, sha256="third"), tmp_path / "third", replace(OPTIONS, seed=2))
    folder.merge(
        before, replace(before, manifest=manifest | {"statistics_sha256": twice.manifest["statistics_sha256"]})
    )


def test_a_model_that_cannot_be_rotated_has_none(text: Text, tmp_path: Path) -> None:
    made = calibrate(open_checkpoint(make_opt(tmp_path / "m")), text, tmp_path / "c", OPTIONS)
    assert (sums(made), made.manifest["residual"]) == ([], None)
    assert second_moments(folder.load(tmp_path / "c")) is None


@pytest.mark.parametrize(
    ("section", "lost"),
    [({"runs": 2, "norms": 2}, ()), ({"runs": 4, "norms": 2}, ()), (None, ()), ({"runs": 3, "norms": 2}, (1,))],
)
def test_sums_elsewhere_than_the_manifest_says_are_damage(
    section: dict[str, int] | None, lost: tuple[int, ...], small_calibration: Calibration, tmp_path: Path
) -> None:
    layers = [dict(layer) for layer in small_calibration.layers]
    for layer in lost:
        del layers[layer][PRODUCT]
    changed = replace(
        small_calibration, manifest=small_calibration.manifest | {"residual": section}, layers=tuple(layers)
    )
    folder.save(changed, tmp_path / "c")
    with pytest.raises(CalibrationError, match=r"damaged \(.*residual.*calibrate again"):
        folder.load(tmp_path / "c")


@pytest.mark.parametrize("change", ["shape", "square", "NaN", "runs"])
def test_sums_that_are_none_are_damage(change: str, small_calibration: Calibration, tmp_path: Path) -> None:
    layers = [dict(layer) for layer in small_calibration.layers]
    if change == "NaN":
        layers[0][PRODUCT] = layers[0][PRODUCT].clone()
        layers[0][PRODUCT][3, 4] = float("nan")
    elif change != "runs":
        layers[0][PRODUCT] = torch.zeros(255, 255 if change == "shape" else 256).double()
    folder.save(replace(small_calibration, layers=tuple(layers)), tmp_path / "c")
    if change == "runs":
        path = tmp_path / "c" / "calibration.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"residual": {"runs": -1, "norms": 2}}))
    with pytest.raises(CalibrationError, match=r"damaged \(.*residual.*calibrate again"):
        folder.load(tmp_path / "c")
