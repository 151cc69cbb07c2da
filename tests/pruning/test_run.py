"""`prune`: an ordinary checkpoint with a pattern, whole or not at all, from a model of any kind."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import make_model

from sparsepack import prune
from sparsepack.calibrate import folder
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.prune import PruneOptions, SitePattern
from sparsepack.errors import CalibrationError, CheckpointError, OutputError, PruningError, SiteError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.writer import write_checkpoint
from sparsepack.models.pattern import Pattern, check_pattern
from sparsepack.models.provenance import PRUNING_FILE, pruning_record

OPTIONS = PruneOptions(6, 8, windows=4)
BY_SIZE = PruneOptions(6, 8, method="magnitude")


@pytest.fixture(scope="session")
def calibration(small_calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prune") / "calibration"
    folder.save(small_calibration, path)
    return path


def pruned_patterns(path: Path) -> Mapping[str, Pattern]:
    record = pruning_record(path)
    assert record is not None
    return record.patterns


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """What stock transformers makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    return found


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_the_result_is_an_ordinary_checkpoint_with_the_pattern(
    method: str, small: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    asked = (BY_SIZE,) if method == "magnitude" else (replace(OPTIONS, method=method), calibration)
    made = prune(small, tmp_path / "pruned", *asked)
    pruned = open_checkpoint(tmp_path / "pruned")
    assert len(made.matrices) == 3 * 7
    patterns = pruned_patterns(tmp_path / "pruned")
    for name in small.source.shapes:
        before, after = small.tensor(name), pruned.tensor(name)
        assert after.dtype == before.dtype
        pattern = patterns.get(name.removesuffix(".weight"))
        assert (pattern is None) == torch.equal(after, before), name
        assert (pattern is None) == (after.dim() < 2 or "layers" not in name), name
        if pattern is not None:
            check_pattern(after, pattern)
            assert (after != 0).float().mean() == pytest.approx(0.75, abs=0.01)
    ids = torch.arange(40)[None]
    assert 0 < (logits(tmp_path / "pruned", ids) - logits(small.path, ids)).abs().mean() < 1
    assert (tmp_path / "pruned" / "tokenizer.json").read_text() == small.tokenizer_json()


def test_what_is_lost_is_told_for_each_matrix(small: Checkpoint, calibration: Path, tmp_path: Path) -> None:
    made = prune(small, tmp_path / "pruned", replace(OPTIONS, keep=4, of=6), calibration)
    record = json.loads((tmp_path / "pruned" / PRUNING_FILE).read_text())
    assert record["options"]["method"] == "sparsegpt"
    assert record["model_sha256"] == small.sha256
    assert [row["matrix"] for row in record["matrices"]] == [row.matrix for row in made.matrices]
    down = next(row for row in made.matrices if row.matrix == "model.layers.1.mlp.down_proj")
    assert (down.site, down.keep, down.of, down.tail) == ("blk.1.mlp_mid", 4, 6, 512 % 6)
    assert down.density == pytest.approx((85 * 4 + 2) / 512, abs=0.01)
    assert 0 < down.error < 0.6


def test_sites_may_differ_and_be_left_out(small: Checkpoint, calibration: Path, tmp_path: Path) -> None:
    sites = (SitePattern("blk.1.*", 14, 16), SitePattern("blk.1.mlp_mid", 16, 16))
    options = replace(OPTIONS, ignore=("blk.0.attn_*",), sites=sites)
    prune(small, tmp_path / "pruned", options, calibration)
    found = pruned_patterns(tmp_path / "pruned")
    assert "model.layers.0.self_attn.q_proj" not in found
    assert found["model.layers.0.mlp.down_proj"] == Pattern(6, 8)
    assert found["model.layers.1.self_attn.o_proj"] == Pattern(14, 16)
    assert "model.layers.1.mlp.down_proj" not in found
    assert found["model.layers.2.self_attn.o_proj"] == Pattern(6, 8)
    pruned = open_checkpoint(tmp_path / "pruned")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(pruned.tensor(name), small.tensor(name))


@pytest.mark.parametrize("method", ["magnitude", pytest.param("sparsegpt", marks=pytest.mark.long)])
def test_a_better_order_loses_less_of_the_matrices_behind_it(
    method: str, tiny: Checkpoint, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = BY_SIZE if method == "magnitude" else PruneOptions(6, 8, method=method, windows=8)
    read = None
    if method != "magnitude":
        read = tmp_path / "calibration"
        folder.save(request.getfixturevalue("tiny_calibration"), read)
    plain = prune(tiny, tmp_path / "plain", options, read).matrices
    better = prune(tiny, tmp_path / "better", replace(options, permute=True), read).matrices
    rows = [(p, b) for p, b in zip(plain, better, strict=True) if b.permuted]
    assert {row.site.split(".")[2] for row, _ in rows} == {"mlp_mid", "attn_out"}
    assert sum(b.error for _, b in rows) < 0.95 * sum(p.error for p, _ in rows)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"permute": True}, marks=pytest.mark.long), {"method": "magnitude"}], ids=str
)
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(
    changes: dict[str, Any], small: Checkpoint, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BY_SIZE if changes == {"method": "magnitude"} else replace(OPTIONS, **changes)
    read = None if options is BY_SIZE else calibration
    prune(small, tmp_path / "whole", options, read)
    calls = []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return block(*given)

    from sparsepack.calibrate.pruning import prune_block as block

    monkeypatch.setattr("sparsepack.calibrate.pruning.prune_block", interrupted)
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        prune(small, tmp_path / "pruned", options, read)
    assert not (tmp_path / "pruned").exists()
    prune(small, tmp_path / "pruned", options, read)
    assert [given[1] for given in calls] == [0, 1, 1, 2]
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "pruned" / file.name).read_bytes(), file.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pruned", "whole"]


def test_a_large_result_is_several_files_that_anything_loads(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BY_SIZE
    prune(small, tmp_path / "whole", options)
    monkeypatch.setattr("sparsepack.calibrate.pruning.write_checkpoint", partial(write_checkpoint, shard_bytes=50_000))
    prune(small, tmp_path / "parts", options)
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors*"))
    assert files[-1] == "model.safetensors.index.json"
    assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    ids = torch.arange(3, 12)[None]
    assert torch.equal(logits(tmp_path / "parts", ids), logits(tmp_path / "whole", ids))


def test_magnitude_runs_nothing(small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sparsepack.models.hf_model.blocks.BlockStream.__call__", lambda *_: pytest.fail("a block was run")
    )
    made = prune(small, tmp_path / "pruned", BY_SIZE)
    assert made.calibration_sha256 is None


def test_a_gguf_becomes_a_folder(shared: Path, tmp_path: Path) -> None:
    from sparsepack.packing import PackRequest, pack

    pack(PackRequest("shipped:tiny", tmp_path / "m.gguf", format="f16"))
    prune(str(tmp_path / "m.gguf"), tmp_path / "pruned", BY_SIZE)
    pruned = open_checkpoint(tmp_path / "pruned")
    ids = pruned.tokenizer("It was a dark night")["input_ids"]
    assert ids == open_checkpoint("shipped:tiny").tokenizer("It was a dark night")["input_ids"]


def test_a_pruned_model_can_be_pruned_again_and_replaced(small: Checkpoint, tmp_path: Path) -> None:
    options = BY_SIZE
    prune(small, tmp_path / "pruned", options)
    prune(tmp_path / "pruned", tmp_path / "more", replace(options, keep=4))
    assert pruned_patterns(tmp_path / "more")["model.layers.0.mlp.up_proj"] == Pattern(4, 8)
    with pytest.raises(OutputError, match="exists already"):
        prune(small, tmp_path / "pruned", options)
    prune(small, tmp_path / "pruned", options, overwrite=True)
    with pytest.raises(OutputError, match=f"a folder without {PRUNING_FILE}"):
        prune(small, small.path, options, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep": 8}, r"keep 8 of 8: expected 1 <= keep < of <= 16"),
        ({"keep": 0}, r"keep 0: expected at least 1"),
        ({"of": 32}, r"of 32: expected at least 2 and at most 16"),
        ({"sites": (SitePattern("blk.0.*", 9, 8),)}, r"blk\.0\.\*: keep 9 of 8: expected"),
        ({"method": "random"}, "'random': expected one of magnitude, wanda, sparsegpt"),
        ({"windows": 0}, "windows 0"),
        ({"damping": 0.0}, r"damping 0\.0: expected above 0"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    small: Checkpoint, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(PruningError, match=said):
        prune(small, tmp_path / "pruned", replace(OPTIONS, **changes))
    assert not list(tmp_path.iterdir())


def test_what_is_missing_or_of_another_model_is_one_line(
    small: Checkpoint, tiny: Checkpoint, calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(PruningError, match="method sparsegpt: it needs the inputs of the matrices; give --calibration"):
        prune(small, tmp_path / "pruned", OPTIONS)
    with pytest.raises(CalibrationError, match="calibrate this model"):
        prune(tiny, tmp_path / "pruned", OPTIONS, calibration)
    with pytest.raises(SiteError, match="matches no site"):
        prune(small, tmp_path / "pruned", replace(OPTIONS, ignore=("blk.7.*",)), calibration)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model(tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are NaN or infinite"):
        prune(model, tmp_path / "pruned", BY_SIZE)
    assert not (tmp_path / "pruned").exists()
