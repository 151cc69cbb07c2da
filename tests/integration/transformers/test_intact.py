"""A slid folder that is damaged, or holds what was not packed, does not get into transformers."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands_for_tests import fails, sparsepack
from models_for_tests import TEXT, make_model

from sparsepack import prune
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import ArtifactError, UserError
from sparsepack.files.hashing import sha256_bytes
from sparsepack.files.tensors import INDEX, WEIGHTS
from sparsepack.formats.containers.safetensors import CONFIG, MANIFEST, sealed, unsealed
from sparsepack.formats.open import open_artifact
from sparsepack.formats.verify import verify
from sparsepack.packing import PackRequest, pack

IDS = torch.arange(3, 40)[None]
ADDED = {"<|extra|>": 511}


@pytest.fixture(scope="module")
def slid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pruned model in every slid format, by its name; the source has the old files of a tokenizer."""
    folder = tmp_path_factory.mktemp("intact")
    model = make_model(folder / "m", "qwen2", num_hidden_layers=1)
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (model / "added_tokens.json").write_text("{}")
    prune(model, folder / "pruned", PruneOptions(6, 8, method="magnitude"))
    made = {name: folder / name for name in ("slide-int8", "slide-fp8", "slide-bf16")}
    for name, path in made.items():
        pack(PackRequest(str(folder / "pruned"), path, format=name))
    return made


@pytest.fixture
def copied(slid: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(slid["slide-int8"], tmp_path / "s"))


def loaded(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def seal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the manifest anew, its own hash right, after `change` of what stands in it."""
    inside = unsealed(folder / MANIFEST)
    del inside["sha256"]
    change(inside)
    (folder / MANIFEST).write_bytes(sealed(inside))


def test_a_flipped_bit_of_any_tensor_is_refused_before_it_is_loaded(copied: Path) -> None:
    tensors, file = open_artifact(copied).tensors, copied / WEIGHTS
    for name, info in tensors.items():
        at = info.start + info.nbytes // 2
        flip(file, at)
        with pytest.raises(ArtifactError, match=rf"damaged: {re.escape(name)} does not match the SHA-256"):
            loaded(copied)
        flip(file, at)
    assert torch.isfinite(loaded(copied)(IDS).logits).all()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", MANIFEST])
def test_a_text_that_was_changed_is_refused_by_name(name: str, copied: Path) -> None:
    flip(copied / name, (copied / name).stat().st_size // 2)
    with pytest.raises(ArtifactError, match=name):
        loaded(copied)


def test_patterns_that_were_changed_are_refused(copied: Path) -> None:
    text = (copied / CONFIG).read_text()
    (copied / CONFIG).write_text(text.replace("\n", "", 1))
    with pytest.raises(ArtifactError, match=r"config\.json does not match its SHA-256"):
        loaded(copied)
    (copied / CONFIG).write_text(text)
    config = transformers.AutoConfig.from_pretrained(copied)
    config.quantization_config["patterns"].popitem()
    with pytest.raises(ArtifactError, match="has other Linears than"):
        loaded(copied, config=config)


def test_who_leaves_the_check_out_is_told(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded(copied)
    assert "hashes" not in capsys.readouterr().err
    info = open_artifact(copied).tensors["model.norm.weight"]
    flip(copied / WEIGHTS, info.start)
    (copied / "added_tokens.json").write_text("{}\n")
    monkeypatch.setenv("SPARSEPACK_VERIFY", "0")
    loaded(copied)
    assert f"{copied}: loaded without a look at its hashes, as SPARSEPACK_VERIFY is 0" in capsys.readouterr().err
    monkeypatch.setenv("SPARSEPACK_VERIFY", "1")
    with pytest.raises(ArtifactError):
        loaded(copied)


@pytest.mark.parametrize("manifest", [True, False], ids=["packed", "without a manifest"])
@pytest.mark.parametrize(
    "place", ["/dev/zero", "../other/model.safetensors", "sub/model.safetensors", "pipe", "device"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(place: str, manifest: bool, copied: Path) -> None:
    """What lies there is not opened: a pipe would wait, a device has no end."""
    os.mkfifo(copied / "pipe")
    (copied / "device").symlink_to("/dev/zero")
    weights = copied / WEIGHTS
    for folder in (copied / "sub", copied.parent / "other"):
        folder.mkdir()
        shutil.copy(weights, folder)
    names = list(open_artifact(copied).tensors)
    weights.rename(copied / "own.safetensors")
    weight_map = {**dict.fromkeys(names, "own.safetensors"), names[0]: place}
    (copied / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if not manifest:
        (copied / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match="is missing or lies outside of the folder"):
        loaded(copied)
    assert not manifest or not verify(copied).passed


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, CONFIG])
def test_a_file_that_is_a_device_is_refused(name: str, copied: Path) -> None:
    (copied / name).unlink()
    (copied / name).symlink_to("/dev/zero")
    assert name in verify(copied).problems[0]
    with pytest.raises((UserError, OSError, ValueError)):
        loaded(copied)


NOT_FINITE = {
    "slide-int8": [("model.layers.0.mlp.up_proj.weight_scale", b"\xff\xff\xff\x7f")],
    "slide-fp8": [
        ("model.layers.0.mlp.up_proj.weight_scale", b"\x00\x00\x80\x7f"),
        ("model.layers.0.mlp.up_proj.weight", b"\x7f"),
    ],
    "slide-bf16": [("model.layers.0.mlp.up_proj.weight", b"\x80\xff"), ("model.embed_tokens.weight", b"\xff\x7f")],
}


@pytest.mark.parametrize("format", NOT_FINITE)
def test_values_that_are_not_finite_are_refused_though_their_hash_is_right(
    format: str, slid: dict[str, Path], tmp_path: Path
) -> None:
    for number, (name, value) in enumerate(NOT_FINITE[format]):
        folder = Path(shutil.copytree(slid[format], tmp_path / str(number)))
        info, data = open_artifact(folder).tensors[name], bytearray((folder / WEIGHTS).read_bytes())
        end = info.start + info.nbytes
        data[end - len(value) : end] = value
        (folder / WEIGHTS).write_bytes(data)
        digest = sha256_bytes(bytes(data[info.start : end]))
        seal(folder, lambda inside, name=name, digest=digest: inside["tensors"].update({name: digest}))
        (problem,) = verify(folder).problems
        assert f"{name} has values that are NaN or infinite" in problem
        assert f"{name} has values" in fails("eval", folder, "--perplexity", "shipped:heldout")
        with pytest.raises(ArtifactError, match=re.escape(f"{name} has values that are NaN or infinite")):
            loaded(folder)


UNLISTED = [
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_templates",
    "merges.txt",
    "vocab.json",
    "tokenizer.model",
    "modeling_own.py",
    "custom_generate",
    "pytorch_model.bin",
    "model.fp16.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "preprocessor_config.json",
    "Processor_Config.JSON",
]


@pytest.mark.parametrize("name", UNLISTED)
def test_a_file_that_transformers_may_read_and_nobody_packed_is_refused(name: str, copied: Path) -> None:
    place = copied / name
    place.write_text("{}") if "." in name else place.mkdir()
    (problem,) = verify(copied).problems
    assert f"{name!r} is none of the files that were packed" in problem
    with pytest.raises(ArtifactError, match=re.escape(name)):
        loaded(copied)


def test_a_file_that_only_people_read_may_lie_beside(copied: Path) -> None:
    for name in ("LICENSE.txt", "NOTICE", "notes.txt", "curve.png", ".gitattributes"):
        (copied / name).write_text("x")
    (copied / ".git").mkdir()
    assert verify(copied).passed
    loaded(copied)


def test_every_name_that_transformers_looks_for_is_one_of_them(tmp_path: Path) -> None:
    """The names of all tokenizers' vocabularies, and transformers' constants for everything else."""
    from sparsepack.formats.containers.safetensors import check_unlisted

    names = {value for key, value in vars(transformers.utils).items() if re.fullmatch(r"[A-Z_]*(NAME|FILE|DIR)", key)}
    for file in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for listed in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(), re.DOTALL):
            names |= set(re.findall(r':\s*"([^"]+)"', listed))
    names -= {name for name in names if not isinstance(name, str) or "/" in name}
    assert len(names) > 25
    for name in sorted(names - {"transformers_modules"}):  # the name of a package
        (tmp_path / name).touch()
        with pytest.raises(ArtifactError, match="transformers may read it"):
            check_unlisted(tmp_path, ())
        (tmp_path / name).unlink()


def test_the_old_files_of_a_tokenizer_are_packed_with_it(slid: dict[str, Path]) -> None:
    inside = unsealed(slid["slide-int8"] / MANIFEST)
    assert {"special_tokens_map.json", "added_tokens.json"} < set(inside["files"])


def test_a_copy_by_transformers_is_named_as_what_it_is(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = loaded(copied)
    model.save_pretrained(tmp_path / "copy")
    copy = tmp_path / "copy"
    (tmp_path / "t.txt").write_text(TEXT[:2000])
    said = f"{copy}: a packed model without sparsepack.json"
    for command in (("eval", copy, "--perplexity", tmp_path / "t.txt"), ("pack", copy, "-o", tmp_path / "m.gguf")):
        line = fails(*command)
        assert said in line
        assert "`sparsepack pack` wrote" in line
    report = verify(copy)
    assert said in report.problems[0]
    assert report.checked == ()
    assert said.removeprefix(f"{copy}: ") in sparsepack("verify", copy).output
    capsys.readouterr()
    assert torch.equal(loaded(copy)(IDS).logits, model(IDS).logits)
    assert f"{copy}: sparsepack.json is missing, as after save_pretrained" in capsys.readouterr().err


def test_a_copy_that_was_saved_over_an_artifact_is_refused(copied: Path) -> None:
    loaded(copied).save_pretrained(copied)
    assert not verify(copied).passed
    with pytest.raises(ArtifactError):
        loaded(copied)


def test_a_failed_verification_lists_the_checks_that_were_made(copied: Path) -> None:
    assert verify(copied).checked == ("header", "SHA-256 of every tensor", "shapes", "padding")
    flip(copied / WEIGHTS, (copied / WEIGHTS).stat().st_size - 1)
    assert verify(copied).checked == ("header",)
    flip(copied / CONFIG, 10)
    assert verify(copied).checked == ()
