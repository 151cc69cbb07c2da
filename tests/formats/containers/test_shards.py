"""A folder whose tensors lie in several files: the same model to whoever reads it, and damage in any of them told."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forged import forge
from models_for_tests import TEXT
from safetensors.torch import load_file

from sparsepack.cli import main
from sparsepack.errors import ArtifactError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.hashing import sha256_file
from sparsepack.files.tensors import INDEX, WEIGHTS
from sparsepack.formats.containers.safetensors import MANIFEST, sealed, unsealed
from sparsepack.formats.containers.safetensors_writer import FolderPlan, WeightsFile, shards_of
from sparsepack.formats.inspect import describe
from sparsepack.formats.open import open_artifact
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, tensors_of
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import CARD, PackRequest, pack, plan_of

SMALL = 100_000
IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def whole(pruned: Path) -> Path:
    """The slid folder with its tensors in one file."""
    pack(PackRequest(str(pruned), pruned.parent / "whole", format="slide-int8"))
    return pruned.parent / "whole"


@pytest.fixture(scope="module")
def in_shards(pruned: Path) -> Path:
    """The slid folder with its tensors in files of 100 kB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsepack.packing.plan_of", lambda *_: planned(pruned))
        pack(PackRequest(str(pruned), pruned.parent / "shards", format="slide-int8"))
    return pruned.parent / "shards"


@pytest.fixture
def copied(in_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(in_shards, tmp_path / "m"))


def planned(pruned: Path, at_once: int = 1, shard_bytes: int = SMALL) -> FolderPlan:
    plan = plan_of(open_checkpoint(pruned), PackRequest(str(pruned), Path("m"), format="slide-int8"))
    assert isinstance(plan, FolderPlan)
    return replace(plan, at_once=at_once, shard_bytes=shard_bytes)


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of each sealed file, by its name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CARD}


def test_each_file_holds_what_fits_and_the_index_says_which(in_shards: Path, pruned: Path) -> None:
    names, index = shard_names(in_shards), json.loads((in_shards / INDEX).read_text())
    count = len(names)
    assert count > 3
    assert names == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    found = {name: load_file(in_shards / name) for name in names}
    assert index["weight_map"] == {tensor: name for name in names for tensor in found[name]}
    sizes = [sum(tensor.nbytes for tensor in of_file.values()) for of_file in found.values()]
    assert index["metadata"] == {"total_size": sum(sizes)}
    large = max(sum(tensor.nbytes for tensor in group.tensors) for group in planned(pruned).groups)
    assert max(sizes) <= max(SMALL, large)
    assert planned(pruned).total_bytes == sum(map(len, content(in_shards).values()))


def test_a_sparsepack_that_knows_one_file_refuses_it_by_its_schema(in_shards: Path) -> None:
    inside = unsealed(in_shards / MANIFEST)
    assert inside["manifest"]["schema"] == 3
    assert "header_sha256" not in inside


def test_groups_keep_their_order_and_stay_whole() -> None:
    sizes = [3, 4, 20, 1, 9, 1]
    groups = [
        PlannedGroup((PlannedTensor(f"{n}", (size,), "U8"), PlannedTensor(f"{n}s", (1,), "U8")), lambda: ())
        for n, size in enumerate(sizes)
    ]
    shards = shards_of(groups, 12)
    names = [" ".join(tensor.name for tensor in shard.tensors) for shard in shards]
    assert names == ["0 0s 1 1s", "2 2s", "3 3s 4 4s", "5 5s"]
    assert shards_of(groups, 1000) == (WeightsFile(WEIGHTS, groups),)
    assert tensors_of([group for shard in shards for group in shard.groups]) == tensors_of(groups)


def test_threads_write_the_files_that_one_writes(pruned: Path, in_shards: Path, tmp_path: Path) -> None:
    for at_once in (2, 5):
        planned(pruned, at_once).write(tmp_path / str(at_once))
        assert content(tmp_path / str(at_once)) == content(in_shards)


def test_groups_are_made_from_each_file_in_turn(tmp_path: Path, pruned: Path) -> None:
    made = []

    def produce(number: int) -> list[torch.Tensor]:
        made.append(number)
        return [torch.zeros(10, dtype=torch.uint8)]

    groups = tuple(
        PlannedGroup((PlannedTensor(str(n), (10,), "U8"),), lambda number=n: produce(number)) for n in range(7)
    )
    forge(planned(pruned, shard_bytes=30), groups=groups).write(tmp_path / "m")
    assert made == [0, 3, 6, 1, 4, 2, 5]


def test_it_is_the_model_that_one_file_is(in_shards: Path, whole: Path, pruned: Path) -> None:
    report = verify(in_shards, str(pruned))
    assert report.passed, report.problems
    one, several = open_artifact(whole), open_artifact(in_shards)
    assert list(one.tensors) == list(several.tensors)
    for name in one.tensors:
        if one.holds_weights(name):
            assert torch.equal(one.decoded(name), several.decoded(name))
    described = describe(in_shards)
    assert described["bits_per_weight"]["blocks"] == describe(whole)["bits_per_weight"]["blocks"]
    assert described["file_bytes"] == sum(map(len, content(in_shards).values()))
    for verb in ("inspect", "verify"):
        result = CliRunner().invoke(main, [verb, str(in_shards)])
        assert result.exit_code == 0, result.output


@torch.inference_mode()
def test_transformers_loads_it(in_shards: Path, whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (in_shards, whole)]
    assert {type(model.model.layers[0].mlp.up_proj).__name__ for model in models} == {"Sparse24Linear"}
    assert torch.equal(*(model(IDS).logits for model in models))


def test_it_is_evaluated_as_one_file_is(in_shards: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:3000])
    asked = {"perplexity": (str(tmp_path / "text.txt"),), "context": 64, "windows": 2, "protocol": "dense"}
    found = [evaluate(EvalRequest(str(path), **asked))["perplexity"][0]["perplexity"] for path in (in_shards, whole)]
    assert found[0] == found[1]


def test_a_flipped_bit_in_any_file_is_refused(copied: Path) -> None:
    for name in (*shard_names(copied), INDEX):
        data = (copied / name).read_bytes()
        for at in (0, 20, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[at] ^= 1
            (copied / name).write_bytes(changed)
            assert not verify(copied).passed, (name, at)
        (copied / name).write_bytes(data)
    assert verify(copied).passed


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_shard_that_is_truncated_or_missing_is_named(copied: Path, number: int) -> None:
    shard = copied / shard_names(copied)[number]
    for spoil in (lambda: shard.write_bytes(shard.read_bytes()[:-1]), shard.unlink):
        spoil()
        (problem,) = verify(copied).problems
        assert f"{shard.name} is missing or has not the" in problem
        assert "\n" not in problem


def test_shards_that_changed_places_are_refused(copied: Path) -> None:
    first, second, *_ = (copied / name for name in shard_names(copied))
    other = first.rename(copied / "other")
    second.rename(first)
    other.rename(second)
    assert not verify(copied).passed


def seal_anew(folder: Path) -> None:
    """As if the index had been written so, or not at all."""
    inside = unsealed(folder / MANIFEST)
    del inside["sha256"], inside["files"][INDEX]
    if (folder / INDEX).exists():
        inside["files"][INDEX] = {"sha256": sha256_file(folder / INDEX)}
    (folder / MANIFEST).write_bytes(sealed(inside))


def _unknown(index: dict[str, Any]) -> None:
    index["weight_map"]["model.bonus.weight"] = next(iter(index["weight_map"].values()))


def _missed(index: dict[str, Any]) -> None:
    del index["weight_map"]["model.norm.weight"]


def _elsewhere(index: dict[str, Any]) -> None:
    index["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_unknown, r"model\.bonus\.weight in model-00001-of-\d+\.safetensors, it is in none"),
        (_missed, r"model\.norm\.weight in no file, it is in model-\d+"),
        (_elsewhere, r"model\.norm\.weight in model-00009-of-00009\.safetensors, it is in model-\d+"),
        (dict.clear, "weight_map"),
        (lambda index: index.update(weight_map=[]), "mapping"),
    ],
)
def test_an_index_that_does_not_fit_is_one_line(copied: Path, change: Callable[[Any], object], said: str) -> None:
    index = json.loads((copied / INDEX).read_text())
    change(index)
    (copied / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=r"index\.json does not match its SHA-256"):
        open_artifact(copied)
    seal_anew(copied)
    with pytest.raises(ArtifactError, match=said) as caught:
        open_artifact(copied)
    assert "\n" not in str(caught.value)


def test_without_its_index_it_is_refused(copied: Path) -> None:
    (copied / INDEX).unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors\.index\.json is missing"):
        open_artifact(copied)
    seal_anew(copied)
    with pytest.raises(ArtifactError, match=r"it lists neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_artifact(copied)


def test_a_file_of_another_folder_that_transformers_would_read_is_told(copied: Path, whole: Path) -> None:
    shutil.copy(whole / WEIGHTS, copied)
    (problem,) = verify(copied).problems
    assert problem.startswith(f"{copied}: '{WEIGHTS}' is none of the files that were packed, and transformers may read")
