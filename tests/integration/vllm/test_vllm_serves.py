"""vLLM serves slid folders: the tokens of transformers, and a clear error for what is damaged or was never tried."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm_for_tests import ON_TWO_CORES, PROMPTS, Refused, assert_greedy, in_transformers, in_vllm, made, started

import sparsepack
from sparsepack.errors import ArtifactError
from sparsepack.formats.containers.safetensors import MANIFEST, sealed, unsealed
from sparsepack.integration.vllm.config import FolderVllmConfig, _check_bytes
from sparsepack.integration.vllm.plugin import register
from sparsepack.packing import plan_of

TINY = "shipped:tiny"
AS_LIKELY = 0.02
"""Of the standard deviation of logits: where vLLM and transformers add up in another order, an input of a Linear can be
rounded to the next step, and the likelier of two tokens whose logits differ by less become the other."""
AS_LIKELY_OF_RANKS = 0.04
"""The same for the books model on two ranks, which missed by 0.026, where noise of a millionth makes transformers
choose vLLM's token, too; beside transformers that quantises whole inputs it misses by 0.062, which is seen."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(TINY, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def books(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsepack.packing.plan_of", lambda *given: replace(plan_of(*given), shard_bytes=4 << 20))
        folder = made(str(shared / "models" / "books-26m-silu"), tmp_path_factory.mktemp("books"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {}], ids=["eager", "compiled"])
@pytest.mark.parametrize(("model", "margin"), [("tiny", 0), ("books", AS_LIKELY)])
def test_tokens_are_those_of_transformers(
    model: str, margin: float, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    assert_greedy(folder, in_vllm(folder, PROMPTS, **options), margin)


@pytest.mark.parametrize(
    ("model", "ranks", "margin"),
    [("tiny", 2, AS_LIKELY), ("tiny", 4, AS_LIKELY), ("books", 2, AS_LIKELY_OF_RANKS)],
)
def test_tokens_of_several_ranks_are_those_of_transformers(
    model: str, ranks: int, margin: float, request: pytest.FixtureRequest
) -> None:
    """Of the two KV heads of the tiny model, each is on two of four ranks."""
    folder: Path = request.getfixturevalue(model)
    written = in_vllm(folder, PROMPTS, enforce_eager=True, tensor_parallel_size=ranks)
    assert_greedy(folder, written, margin, ranks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_lora": True}, r"a LoRA adapter \(--enable-lora\)"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            r"speculative decoding \(--speculative-config\)",
        ),
    ],
    ids=["lora", "speculative"],
)
def test_what_was_never_tried_is_refused_in_a_line_of_the_log(
    options: dict[str, object], said: str, tiny: Path
) -> None:
    with pytest.raises(Refused, match=rf"UserError: {said}: not supported with slide-int8"):
        in_vllm(tiny, PROMPTS[:1], enforce_eager=True, **options)


def test_damage_is_refused_in_a_line_of_the_log(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"ArtifactError: .*: damaged: model\.layers\.2\.\S* does not match the SHA-256"):
        in_vllm(damaged(tiny, tmp_path / "damaged"), PROMPTS[:1], enforce_eager=True)


def test_weights_of_another_folder_take_their_place(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = in_transformers(Path(sparsepack.__file__).parent / "data" / "tiny")
    model.model.layers[1].mlp.down_proj.weight.data.neg_()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "other")
    other = made(str(tmp_path / "other"), tmp_path)
    written = in_vllm(tiny, PROMPTS, reload=other, enforce_eager=True)
    assert_greedy(other, written)
    with pytest.raises(AssertionError):
        assert_greedy(tiny, written)


def test_a_copy_by_save_pretrained_is_served(tiny: Path, tmp_path: Path) -> None:
    for part in in_transformers(tiny):
        part.save_pretrained(tmp_path / "copy")
    assert_greedy(tiny, in_vllm(tmp_path / "copy", PROMPTS, enforce_eager=True))


def config_of(folder: Path) -> FolderVllmConfig:
    from transformers import AutoConfig

    return FolderVllmConfig.from_config(AutoConfig.from_pretrained(folder).quantization_config)


def damaged(folder: Path, copy: Path) -> Path:
    """A copy of which one bit of a weight has changed."""
    shutil.copytree(folder, copy)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    return copy


def of_a_newer_schema(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    inside = unsealed(copy / MANIFEST)
    inside["manifest"]["schema"] = 99
    del inside["sha256"]
    (copy / MANIFEST).write_bytes(sealed(inside))
    return copy


def without_its_tensors(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    return copy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged, "damaged"),
        (of_a_newer_schema, "has schema 99 .* update sparsepack"),
        (without_its_tensors, r"no \.safetensors files"),
    ],
)
def test_folders_that_are_not_intact_are_refused(
    change: Callable[[Path, Path], Path], said: str, tiny: Path, tmp_path: Path
) -> None:
    config = config_of(tiny)
    config.maybe_update_config(str(tiny))
    with pytest.raises(ArtifactError, match=said):
        config.maybe_update_config(str(change(tiny, tmp_path / "copy")))


def test_a_missing_shard_is_refused(books: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(books, tmp_path / "copy"))
    config = config_of(copy)
    next(copy.glob("*.safetensors")).unlink()
    with pytest.raises(ArtifactError, match="missing"):
        config.maybe_update_config(str(copy))


def test_what_is_not_checked_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny)
    config.maybe_update_config("owner/name")
    assert "owner/name: not compared with its hashes" in capsys.readouterr().err
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    (copy / MANIFEST).unlink()
    config.maybe_update_config(str(copy))
    assert f"{MANIFEST} is missing" in capsys.readouterr().err
    monkeypatch.setenv("SPARSEPACK_VERIFY", "0")
    _check_bytes.cache_clear()
    config.maybe_update_config(str(tiny))
    assert "loaded without a look at its hashes" in capsys.readouterr().err
    config.attention = True
    config.maybe_update_config(str(tiny))
    assert "attention is dense in vLLM" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match=r"no \.safetensors files"):
        config.maybe_update_config(str(tmp_path))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"format": "slide-int3", "patterns": {}}, "format 'slide-int3': expected one of slide-"),
        ({"format": "slide-int8", "patterns": {"a": [9, 8]}}, "patterns: not understood"),
        ({}, "format '': expected one of slide-"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(section: dict[str, object], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        FolderVllmConfig.from_config(section)


def test_it_is_registered_as_often_as_vllm_likes() -> None:
    for _ in range(2):
        register()
    assert get_quantization_config("sparsepack") is FolderVllmConfig


def test_registering_makes_no_cuda_context_and_imports_little() -> None:
    code = (
        "import sys, vllm.engine.arg_utils, vllm.model_executor.layers.quantization, torch\n"
        "before = set(sys.modules)\n"
        "from sparsepack.integration.vllm.plugin import register\n"
        "register()\n"
        "print(torch.cuda.is_initialized(), sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    run = started(["-c", code], {**ON_TWO_CORES, "VLLM_PLUGINS": ""})
    assert run.stdout.splitlines()[-1] == "False ['sparsepack']", run.stderr
