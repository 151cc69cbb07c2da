"""vLLM serves slid folders: the tokens of transformers, and a clear error for what is damaged or was never tried."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm_for_tests import ON_TWO_CORES, Refused, in_vllm, started

import sparsepack
from sparsepack.errors import ArtifactError
from sparsepack.formats.containers.safetensors.layout import MANIFEST
from sparsepack.integration.vllm.config import SlidVllmConfig, _check_bytes
from sparsepack.integration.vllm.plugin import register
from sparsepack.packing import PackRequest, pack, plan_of
from sparsepack.pruning.options import PruneOptions

TINY = "shipped:tiny"
AS_LIKELY = 0.02
"""Of the standard deviation of logits: where vLLM and transformers add up in another order, an input of a Linear can be
rounded to the next step, and the likelier of two tokens whose logits differ by less become the other."""
PROMPTS = [
    *(
        "Once upon a time",
        "The little dog",
        "She said",
        "It was a cold evening, and",
        "A",
        "There is no",
        "The sea was",
    ),
    *("When he came home", "In the year", "Nobody knew", "My dear friend,", "The door", "At last they", "What is the"),
    *("Of all the", "A small boat", "He had never", "I think", "The old man looked at the", "And then"),
]


def made(model: str, folder: Path, format: str = "slide-int8") -> Path:
    """The model pruned 6 of 8 and slid."""
    sparsepack.prune(model, folder / "pruned", PruneOptions(6, 8, method="magnitude"))
    pack(PackRequest(str(folder / "pruned"), folder / "slid", format=format))
    return folder / "slid"


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


def in_transformers(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, as transformers has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def assert_greedy(folder: Path, written: list[list[int]], margin: float = 0) -> None:
    """Every token is the one that transformers finds the likeliest behind those before it, or one whose logit is not
    further below than `margin` standard deviations of the logits."""
    model, tokenizer = in_transformers(folder)
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids + tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, -len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        missed = (logits.amax(1) - chosen) / logits.std(1)
        assert (missed <= margin).all(), (prompt, missed.tolist())


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {}], ids=["eager", "compiled"])
@pytest.mark.parametrize(("model", "margin"), [("tiny", 0), ("books", AS_LIKELY)])
def test_tokens_are_those_of_transformers(
    model: str, margin: float, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    assert_greedy(folder, in_vllm(folder, PROMPTS, **options), margin)


@pytest.mark.parametrize("model", ["tiny", "books"])
def test_two_ranks_choose_other_tokens_only_where_two_are_as_likely(model: str, request: pytest.FixtureRequest) -> None:
    """Inputs of a Linear whose columns are shared out are quantised by each rank, with a scale of its own."""
    folder: Path = request.getfixturevalue(model)
    assert_greedy(folder, in_vllm(folder, PROMPTS, enforce_eager=True, tensor_parallel_size=2), AS_LIKELY)


def test_a_lora_adapter_is_refused_in_a_line_of_the_log(tiny: Path) -> None:
    with pytest.raises(Refused, match=r"UserError: a LoRA adapter .* not supported with slid weights"):
        in_vllm(tiny, PROMPTS[:1], enforce_eager=True, enable_lora=True)


def test_a_copy_by_save_pretrained_is_served(tiny: Path, tmp_path: Path) -> None:
    for part in in_transformers(tiny):
        part.save_pretrained(tmp_path / "copy")
    assert_greedy(tiny, in_vllm(tmp_path / "copy", PROMPTS, enforce_eager=True))


def config_of(folder: Path) -> SlidVllmConfig:
    from transformers import AutoConfig

    return SlidVllmConfig.from_config(AutoConfig.from_pretrained(folder).quantization_config)


def test_the_bytes_of_a_folder_are_compared_with_their_hashes(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny)
    config.maybe_update_config(str(tiny))
    damaged = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        config.maybe_update_config(str(damaged))


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
        SlidVllmConfig.from_config(section)


def test_it_is_registered_as_often_as_vllm_likes() -> None:
    for _ in range(2):
        register()
    assert get_quantization_config("sparsepack") is SlidVllmConfig


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
