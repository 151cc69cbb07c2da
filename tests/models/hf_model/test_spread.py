"""A model that one GPU has no room for goes over several, and computes the same."""

from typing import Any

import pytest
import torch
from models_for_tests import VOCABULARY, make_model

from sparsepack.errors import UserError
from sparsepack.eval.scorer import SparseScorer
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model import model as module
from sparsepack.models.hf_model.model import Places, build_model, place_of, places_of
from sparsepack.models.sites import SiteRule

IDS = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    changes = {"tie_word_embeddings": True} if request.param == "qwen2" else {}
    return open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", request.param, **changes))


def _free(monkeypatch: pytest.MonkeyPatch, *nbytes: int) -> None:
    """So many bytes are free on each GPU."""
    monkeypatch.setattr(module, "_free", lambda: dict(enumerate(nbytes)))


def _places(checkpoint: Checkpoint, device: str) -> tuple[Places | None, int, list[str]]:
    """What `places_of` says of a model, the bytes that the model takes, and the names of its parameters."""
    seen: list[Any] = []

    def look(model: Any) -> None:
        seen.append((places_of(model, device, torch.float32), [name for name, _ in model.named_parameters()]))
        seen.append(sum(value.numel() * 4 for value in model.parameters()))

    build_model(checkpoint.config, checkpoint.tensor, places=look)
    (places, names), nbytes = seen
    return places, nbytes, names


def _outputs(checkpoint: Checkpoint, device: str, places: Any) -> tuple[torch.Tensor, dict[Any, float]]:
    """Logits of the sparse model, and what it skipped."""
    model = build_model(checkpoint.config, checkpoint.tensor, device, places=places)
    rules = {(layer, site): SiteRule(torch.tensor(0.4)) for layer in range(checkpoint.layers) for site in SITES}
    scorer = SparseScorer(model, checkpoint.family, rules, context=64)
    lengths = torch.full((3,), 20)
    return scorer.logits(IDS, lengths, torch.tensor([0, 7, 20])).cpu(), scorer.realised()


def test_what_fits_goes_to_the_device_that_was_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 1 << 40, 1 << 40)
    assert _places(checkpoint, "cuda")[0] is None
    assert _places(checkpoint, "cpu")[0] is None


@pytest.mark.parametrize(("count", "share"), [(2, 6), (4, 5)])
def test_every_part_has_a_place_and_no_gpu_more_than_it_has_room_for(
    checkpoint: Checkpoint, count: int, share: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _free(monkeypatch, 1 << 40)
    _, nbytes, _ = _places(checkpoint, "cuda")
    _free(monkeypatch, *[nbytes * share // 5] * count)
    places, _, names = _places(checkpoint, "cuda")
    assert places is not None
    taken = dict.fromkeys(range(count), 0)
    for name in names:
        taken[int(place_of(name, places))] += 4 * _numel(checkpoint, name)
    assert max(taken.values()) <= module.ROOM * nbytes * share / 5
    used = sum(1 for value in taken.values() if value)
    assert used > 1
    assert f"spread over {used} GPUs by accelerate's device map" in capsys.readouterr().err


def _numel(checkpoint: Checkpoint, name: str) -> int:
    return torch.Size(checkpoint.source.shapes[name]).numel()


def test_what_all_gpus_together_cannot_hold_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 1000, 1000)
    with pytest.raises(UserError, match=r"do not fit on 2 GPUs, which have .* --device cpu"):
        _places(checkpoint, "cuda")


def test_a_worker_has_one_gpu(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 1000, 1 << 40)
    assert _places(checkpoint, "cuda:0")[0] is None  # one was named: it is out of memory, and says so
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _places(checkpoint, "cuda:1")[0] is None
    with pytest.raises(UserError, match=r"do not fit on cuda:0, .* each worker holds the whole model; run it in one"):
        _places(checkpoint, "cuda:0")


def test_a_model_in_places_computes_the_same(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 1 << 40)
    _, nbytes, _ = _places(checkpoint, "cuda")
    _free(monkeypatch, *[nbytes] * 4)

    def on_cpu(model: Any) -> Places:
        found = places_of(model, "cuda", torch.float32)
        assert found is not None
        return dict.fromkeys(found, "cpu")

    ours, skipped = _outputs(checkpoint, "cpu", on_cpu)
    theirs, expected = _outputs(checkpoint, "cpu", lambda model: None)
    assert torch.equal(ours, theirs)
    assert skipped == expected


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_model_over_two_gpus_computes_the_same(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 1 << 40)
    _, nbytes, _ = _places(checkpoint, "cuda")
    _free(monkeypatch, *[nbytes * 6 // 5] * 2)
    ours, skipped = _outputs(checkpoint, "cuda", lambda model: places_of(model, "cuda", torch.float32))
    theirs, expected = _outputs(checkpoint, "cuda", lambda model: None)
    assert torch.equal(ours, theirs)
    assert skipped == expected
