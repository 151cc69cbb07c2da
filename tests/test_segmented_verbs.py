"""Every verb on a checkpoint whose residual stream changes its basis: what depends on no basis is what it was."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from segments_for_tests import segmented

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.distil import DistilOptions
from sparsepack.calibrate.distillation import distil
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.provenance import pruning_record
from sparsepack.packing import PackRequest, pack
from sparsepack.workers.shard import Shard
from sparsepack.workers.state import state_beside

LONG = pytest.mark.long
STARTS = (1, 2)
BASIS_FREE = ("attn_out", "mlp_mid")
"""What enters o and down does not know in which basis the residual stream is written."""


class Killed(BaseException):
    pass


@dataclass(frozen=True)
class Both:
    """The tiny model, the same with a basis for each block, and what was counted on both."""

    plain: Checkpoint
    changed: Checkpoint
    of_plain: Calibration
    of_changed: Calibration
    folder: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("segments")
    plain = open_checkpoint("shipped:tiny")
    changed = segmented(plain.path, STARTS, folder / "s")
    options = CalibrateOptions(context=64, samples=6, batch=2)
    text = read_text("shipped:train")
    counts = [calibrate(model, text, folder / f"c{n}", options) for n, model in enumerate((plain, changed))]
    return Both(plain, changed, *counts, folder)


@pytest.fixture(scope="module")
def packed(both: Both, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "m.gguf"
    found = AllocationOptions(0.5, windows=4)
    pack(PackRequest(str(both.changed.path), path, calibration=both.folder / "c1", allocation=found))
    return path


def test_calibration_counts_the_same_where_the_basis_does_not_matter(both: Both) -> None:
    for before, after in zip(both.of_plain.layers, both.of_changed.layers, strict=True):
        for site in ("attn_in", *BASIS_FREE):
            moments = [np.asarray(of[f"{site}.second_moment"]) for of in (before, after)]
            assert np.allclose(*moments, rtol=1e-3) == (site in BASIS_FREE), site


def test_perplexity_is_that_of_the_model_from_before(both: Both) -> None:
    values = []
    for model in ("shipped:tiny", str(both.changed.path)):
        result = evaluate(EvalRequest(model, perplexity=("shipped:heldout",), context=64, windows=4, dtype="float32"))
        values.append(result["perplexity"][0]["perplexity"]["value"])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    ids = torch.arange(40)[None]
    plain, changed = (open_subject(str(each.path)).model for each in (both.plain, both.changed))
    with torch.inference_mode():
        assert torch.allclose(plain(ids).logits, changed(ids).logits, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        AllocationOptions(0.5, windows=2),
        pytest.param(AllocationOptions(0.5, "uniform", criterion="column-norm", upstream="dense"), marks=LONG),
        pytest.param(
            AllocationOptions(0.5, "teal", windows=1, include=("blk.*.attn_in", "blk.*.attn_out")), marks=LONG
        ),
        AllocationOptions(0.5, "global", windows=2, steps=2, batch=1, length=32),
    ],
    ids=lambda options: f"{options.allocation}, {options.criterion}",
)
def test_every_allocation_finds_thresholds_and_goes_on_after_a_kill(
    both: Both, options: AllocationOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = find_thresholds(both.changed, both.of_changed, options)
    load: Callable[..., None] = BlockStream.load

    def killed(stream: BlockStream, layer: int) -> None:
        if layer == 2:
            raise Killed
        load(stream, layer)

    with state_beside(tmp_path / "t.json") as state:
        with monkeypatch.context() as patch:
            patch.setattr(BlockStream, "load", killed)
            with pytest.raises(Killed):
                find_thresholds(both.changed, both.of_changed, options, Shard(folder=state))
        again = find_thresholds(both.changed, both.of_changed, options, Shard(folder=state))
    assert again.to_json() == whole.to_json()
    whole.write(tmp_path / "t.json")
    assert read_thresholds(tmp_path / "t.json").outlook() == whole.outlook()
    sites = {key for key, rule in whole.rules.items() if not rule.dense}
    assert {layer for layer, _ in sites} == {0, 1, 2}


def test_a_packed_model_is_intact_and_skips_about_what_was_asked(both: Both, packed: Path) -> None:
    assert verify(packed, both.changed).passed
    rows: dict[str, Any] = {}
    for runtime in ("reference", "cpu", "transformers"):
        request = EvalRequest(str(packed), perplexity=("shipped:heldout",), context=64, windows=4, runtime=runtime)
        rows[runtime] = evaluate(request)["perplexity"][0]
    values = [row["perplexity"]["value"] for row in rows.values()]
    assert max(values) / min(values) < 1.1  # of few tokens; the cpu backend may find other columns active
    skipped = [row["realised_sparsity"] for row in rows.values()]
    assert all(row["of_sparse_sites"] == pytest.approx(0.5, abs=0.08) for row in skipped)
    weights = sum(both.plain.stacked_shape(site)[0] * both.plain.stacked_shape(site)[1] for site in SITES) * 3
    share = weights / (weights + len(STARTS) * 256**2)
    found = find_thresholds(both.changed, both.of_changed, AllocationOptions(0.5, windows=4)).outlook()
    assert found is not None
    for row in (*skipped, asdict(found)):
        assert row["overall"] == pytest.approx(row["of_sparse_sites"] * share)


def test_a_trace_is_the_one_of_the_model_from_before(both: Both, tmp_path: Path) -> None:
    options = TraceOptions(sessions=2, tokens=16, prompt=4, share=0.5)
    made = [
        trace(model, "shipped:heldout", tmp_path / str(n), options, both.folder / f"c{n}")
        for n, model in enumerate((both.plain, both.changed))
    ]
    plain, changed = (np.concatenate([of.session(number) for number in range(2)]) for of in made)
    assert (plain == changed).mean() > 0.99
    assert 0.3 < plain.mean() < 0.7


@pytest.mark.parametrize(
    "options",
    [PruneOptions(6, 8, windows=1), PruneOptions(6, 8, method="magnitude", permute=True, include=("blk.1.attn_*",))],
)
def test_pruning_leaves_bases_as_they_are(both: Both, options: PruneOptions, tmp_path: Path) -> None:
    prune(both.changed, tmp_path / "p", options, None if options.method == "magnitude" else both.folder / "c1")
    pruned = open_checkpoint(tmp_path / "p")
    assert pruned.bases == STARTS
    assert pruning_record(pruned.path) is not None
    for layer in STARTS:
        name = pruned.family.basis(layer)
        assert torch.equal(pruned.tensor(name), both.changed.tensor(name))


def test_it_is_distilled_and_keeps_its_segments(both: Both, tmp_path: Path) -> None:
    made = distil(both.changed, both.folder / "c1", tmp_path / "d", DistilOptions(steps=2, batch=1, length=32))
    distilled = open_checkpoint(tmp_path / "d")
    assert distilled.bases == both.changed.bases
    assert (distilled.dtype, distilled.config.dtype) == (torch.float32, torch.float32)
    for layer in STARTS:
        name = distilled.family.basis(layer)
        assert name not in made.changes
        assert torch.equal(distilled.tensor(name), both.changed.tensor(name).float())
