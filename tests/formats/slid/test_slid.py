"""The slid folder: a pruned model without its zeros, intact, of that model, and what transformers makes of it."""

import hashlib
import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import needs_cuda
from forks_for_tests import in_forks
from models_for_tests import TEXT, make_model

import sparsepack
from sparsepack.bench.run import bench
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.thresholds import AttentionOptions
from sparsepack.errors import ArtifactError, CheckpointError, PackingError, UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import Text
from sparsepack.formats.attention import attention_section
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.safetensors import sealed, unsealed
from sparsepack.formats.inspect import describe
from sparsepack.formats.open import open_artifact
from sparsepack.formats.slide import slid_formats
from sparsepack.formats.table import format_of
from sparsepack.formats.verify import verify
from sparsepack.models.blocks import Heads, RotaryChannels
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.packing import PackRequest, pack, plan_of

FORMATS = tuple(slid_formats())
ERRORS = {
    **{format: BLOCKS[values.name].error for format, values in slid_formats().items()},
    **{"slide-int8": 0.015, "slide-fp8": 0.04, "slide-bf16": 0},
}
IDS = torch.arange(3, 60)[None]


def prune(model: Path, output: Path, keep: int = 6, of: int = 8, **options: Any) -> Path:
    sparsepack.prune(model, output, PruneOptions(keep, of, method="magnitude", **options))
    return output


@pytest.fixture(scope="module")
def slid(pruned: Path) -> dict[str, Path]:
    """The pruned model in every slid format."""
    folders = {format: pruned.parent / format for format in FORMATS}
    for format, folder in folders.items():
        pack(PackRequest(str(pruned), folder, format=format))
    return folders


def loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.inference_mode()
def logits(path: Path) -> torch.Tensor:
    found: torch.Tensor = loaded(path)(IDS).logits
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_intact_and_that_model(format: str, slid: dict[str, Path], pruned: Path) -> None:
    report = verify(slid[format], str(pruned))
    assert report.passed, report.problems
    artifact, checkpoint = open_artifact(slid[format]), open_checkpoint(pruned)
    assert len(report.tensors) == len(checkpoint.source.shapes)
    for name in checkpoint.source.shapes:
        expected, found = checkpoint.tensor(name).float(), artifact.decoded(name)
        if "proj.weight" in name:
            assert torch.equal(found == 0, expected == 0) or format != "slide-bf16"
            assert relative(found, expected) <= ERRORS[format]
            assert torch.equal(artifact.decoded(name, 3, 9), found[3:9])
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("format", "share"), [("slide-int8", 0.9375), ("slide-fp8", 0.9375), ("slide-bf16", 1.6875)])
def test_bytes_are_planned_and_counted_with_positions(
    format: str, share: float, slid: dict[str, Path], pruned: Path
) -> None:
    description = describe(slid[format])
    assert description["bits_per_weight"]["blocks"] == pytest.approx(8 * share)
    sealed = [file for file in slid[format].iterdir() if file.name != "README.md"]
    assert description["file_bytes"] == sum(file.stat().st_size for file in sealed)
    plan = plan_of(open_checkpoint(pruned), PackRequest(str(pruned), Path("x"), format=format))
    assert plan.total_bytes == description["file_bytes"]
    assert {row["program"]: row["loads"] for row in description["loads_in"]} == {
        "sparsepack": True,
        "transformers": True,
        "llama.cpp": False,
    }


@pytest.mark.parametrize("format", FORMATS)
def test_transformers_computes_what_eval_measures(format: str, slid: dict[str, Path], pruned: Path) -> None:
    found, dense = logits(slid[format]), logits(pruned)
    known = {"slide-int8": 0.1, "slide-fp8": 0.3, "slide-bf16": 0.03}
    assert relative(found, dense) < known.get(format, 0.7)
    from sparsepack.eval.subject import open_subject

    subject = open_subject(str(slid[format]))
    lengths = torch.tensor([IDS.shape[1]])
    measured = subject.task_scorer().logits(IDS, lengths, lengths)
    if not slid_formats()[format].scaled:  # whose inputs are rounded too, which is not measured
        assert relative(found, measured) < 0.03
    else:
        assert relative(found, measured) < 0.01  # a value between two steps may fall otherwise
    values = slid_formats()[format]
    assert subject.precision.get("inputs") == (str(values.dtype).removeprefix("torch.") if values.scaled else None)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("format", FORMATS)
@torch.inference_mode()
def test_transformers_computes_the_same_on_a_gpu(format: str, slid: dict[str, Path]) -> None:
    model = loaded(slid[format]).bfloat16()
    expected = model(IDS).logits.float()
    found = model.cuda()(IDS.cuda()).logits.float().cpu()
    # Where the devices' last bits differ, an input may be rounded to FP8's next value, 6 % away.
    assert (found - expected).norm() < (0.08 if format == "slide-fp8" else 0.03) * expected.norm()


def test_its_products_are_timed_on_a_gpu_alone(slid: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"timed on an NVIDIA GPU; add --device cuda$"):
        bench(slid["slide-int8"])
    with pytest.raises(UserError, match=r"take random inputs; leave --text out$"):
        bench(slid["slide-int8"], text="shipped:train")


def test_its_card_says_what_was_done_and_how_to_load_it(slid: dict[str, Path], pruned: Path) -> None:
    card = (slid["slide-fp8"] / "README.md").read_text()
    assert "| pruned | keep 6 of 8: 14 matrices; by magnitude, from `" in card
    assert f'AutoModelForCausalLM.from_pretrained("{slid["slide-fp8"].name}")' in card
    assert f"`{pruned}` (qwen2)" in card
    assert "sparsepack generate" not in card


@pytest.mark.parametrize("format", [None, "slide-int8", "zigzag-q4_k", "f16"])
def test_a_pruned_model_is_compared_with_the_one_from_before(format: str | None, pruned: Path, tmp_path: Path) -> None:
    """Also once it is packed, in any format."""
    subject = pruned if format is None else tmp_path / f"packed{format_of(format).suffix}"
    if format is not None:
        pack(PackRequest(str(pruned), subject, format=format))
    (tmp_path / "text.txt").write_text(TEXT[:3000])
    asked = {"perplexity": (str(tmp_path / "text.txt"),), "context": 64, "windows": 2, "protocol": "dense"}
    against = {}
    for model in (pruned, pruned.parent / "m"):
        result = evaluate(EvalRequest(str(subject), against=str(model), **asked))
        against[model.name] = result["perplexity"][0]["kl_divergence"]["value"]
    assert against["m"] > max(2 * against["pruned"], 1e-4)
    other = make_model(tmp_path / "other", "qwen2", seed=1)
    with pytest.raises(UserError, match=r"other: not the model that .* was made from"):
        evaluate(EvalRequest(str(subject), against=str(other), **asked))


@pytest.mark.parametrize(
    ("family", "keep", "of"),
    [
        *(("mistral", 4, 6), ("qwen3", 8, 10), ("llama", 14, 16)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("llama", 2, 4), ("qwen3", 2, 4))),
    ],
)
def test_any_pattern_and_family_with_tails(family: str, keep: int, of: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", family, intermediate_size=334)
    prune(model, tmp_path / "pruned", keep, of)
    pack(PackRequest(str(tmp_path / "pruned"), tmp_path / "slid", format="slide-int8"))
    assert verify(tmp_path / "slid", str(tmp_path / "pruned")).passed
    assert relative(logits(tmp_path / "slid"), logits(tmp_path / "pruned")) < 0.1


LOADED = "import transformers\nmodel = transformers.AutoModelForCausalLM.from_pretrained({folder!r})"
IMPORTED = "kind = type(model.model.layers[0].mlp.up_proj).__name__\nassert kind == 'Sparse24Linear', kind"


def test_without_sparsepack_it_fails_and_imported_after_transformers_it_is_known(slid: dict[str, Path]) -> None:
    """It fails rather than run with random weights."""
    loaded = LOADED.format(folder=str(slid["slide-int8"]))
    failed, found = in_forks(
        "import transformers.models.llama.modeling_llama", [loaded, f"import sparsepack\n{loaded}\n{IMPORTED}"]
    )
    assert "mismatch" in failed
    assert found == ""


@pytest.mark.long
def test_imported_before_transformers_it_is_known(slid: dict[str, Path]) -> None:
    loaded = LOADED.format(folder=str(slid["slide-int8"]))
    assert in_forks("import sparsepack", [f"{loaded}\n{IMPORTED}"]) == [""]


def test_sites_that_were_left_out_stay_as_they_are(tmp_path: Path) -> None:
    prune(make_model(tmp_path / "m"), tmp_path / "pruned", ignore=("blk.0.*",))
    made = pack(PackRequest(str(tmp_path / "pruned"), tmp_path / "slid", format="slide-int8"))
    assert made.notes == ("7 matrices are not pruned and stay as they are: model.layers.0.mlp.down_proj the first",)
    artifact = open_artifact(tmp_path / "slid")
    name = "model.layers.0.mlp.down_proj.weight"
    assert artifact.tensors[name].type == "BF16"
    assert torch.equal(artifact.decoded(name), open_checkpoint(tmp_path / "m").tensor(name).float())
    assert relative(logits(tmp_path / "slid"), logits(tmp_path / "pruned")) < 0.1


def test_a_model_pruned_elsewhere_needs_its_pattern(pruned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(pruned, other)
    (other / "sparsepack_prune.json").unlink()
    request = PackRequest(str(other), tmp_path / "slid", format="slide-int8")
    with pytest.raises(PackingError, match=r"prune it .*, or give --keep and --of"):
        pack(request)
    pack(PackRequest(str(other), tmp_path / "slid", format="slide-int8", keep=6, of=8))
    assert verify(tmp_path / "slid", str(other)).passed


def test_weights_without_the_pattern_are_named_and_nothing_is_left(pruned: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PackingError, match=r"layers\.0\.\S+\.weight: row 0 has \d nonzeros in its inputs \d+ to \d+, keep 4 "
    ):
        pack(PackRequest(str(pruned), tmp_path / "slid", format="slide-int8", keep=4, of=6))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"format": "slide-int8", "keep": 6}, "keep 6: it does nothing without of; give both"),
        (
            {"format": "zigzag-q4_k", "keep": 6, "of": 8},
            "it is for format slide-int8 or slide-fp8 or slide-bf16",
        ),
        ({"format": "slide-int8", "output_type": "q6_k"}, "stay in the model's own type"),
        ({"format": "slide-int8", "keep": 7, "of": 8}, "have no room for every choice of 7"),
        ({"format": "slide-int8", "keep": 8, "of": 8}, r"keep 8 of 8: expected"),
    ],
)
def test_what_does_not_go_together_is_one_line(asked: dict[str, Any], said: str, pruned: Path, tmp_path: Path) -> None:
    with pytest.raises(PackingError, match=said) as caught:
        pack(PackRequest(str(pruned), tmp_path / "slid", **asked))
    assert "\n" not in str(caught.value)


def test_a_changed_position_is_found(slid: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "slid"
    shutil.copytree(slid["slide-int8"], folder)
    artifact = open_artifact(folder)
    name = "model.layers.1.mlp.up_proj.weight_positions"
    start = artifact.tensors[name].start
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(start + 5)
        (byte,) = file.read(1)
        file.seek(start + 5)
        file.write(bytes([byte ^ 1]))
    report = verify(folder)
    assert not report.passed
    assert name in report.problems[0]
    with pytest.raises(ArtifactError, match="does not match the SHA-256"):
        evaluate(EvalRequest(str(folder), perplexity=("shipped:heldout",)))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_shape_that_is_not_stored_is_refused(name: str, slid: dict[str, Path]) -> None:
    artifact = open_artifact(slid["slide-int8"])
    tensors = {**artifact.manifest["tensors"], name: {"shape": [512, 24], "padding_rows": 0}}
    with pytest.raises(ArtifactError, match=name):
        replace(artifact, manifest={**artifact.manifest, "tensors": tensors}).check_shapes()


def test_a_record_that_is_damaged_is_one_line(pruned: Path, tmp_path: Path) -> None:
    for text in ("[]", "{", '{"schema": 9}', '{"schema": 1, "matrices": [{"matrix": "x", "keep": 9, "of": 8}]}'):
        other = tmp_path / "other"
        shutil.copytree(pruned, other, dirs_exist_ok=True)
        (other / "sparsepack_prune.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"sparsepack_prune\.json: damaged \(.*prune the model again"):
            pack(PackRequest(str(other), tmp_path / "slid", format="slide-int8"))


def test_it_is_no_model_to_pack_again(slid: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="a packed sparsepack artifact"):
        open_checkpoint(slid["slide-int8"])
    assert json.loads((slid["slide-int8"] / "config.json").read_text())["quantization_config"]["format"] == "slide-int8"


def test_sparse_attention_goes_through_a_slid_folder(pruned: Path, tmp_path: Path) -> None:
    text = Text("t", (TEXT[:4000],), "")
    calibrate(str(pruned), text, tmp_path / "c", CalibrateOptions(context=64, samples=4))
    asked = AttentionOptions("double", channels=8, tokens="1/8", dense_layers="0")
    path = tmp_path / "slid"
    pack(PackRequest(str(pruned), path, "slide-int8", calibration=tmp_path / "c", sparse_attention=asked))
    artifact = open_artifact(path)
    assert artifact.manifest["schema"] == 3
    for found in (artifact.attention(), artifact.stock().attention):
        assert found.policy == asked.policy
        assert [None if channels is None else channels.shape for channels in found.channels] == [None, (2, 8)]
    report = verify(path, open_checkpoint(pruned))
    assert report.passed, report.problems
    assert "sparse attention" in report.checked
    assert "those that 8 channels rank best" in (path / "README.md").read_text()
    assert torch.isfinite(loaded(path)(IDS).logits).all()


def test_a_configuration_that_no_model_can_have_is_refused_with_sparse_attention(
    slid: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(slid["slide-int8"], tmp_path / "s"))
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": -256}
    (path / "config.json").write_text(json.dumps(config))
    inside = unsealed(path / "sparsepack.json")
    data = (path / "config.json").read_bytes()
    inside["files"]["config.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    sparse = SparseAttention(TokenPolicy(Fraction(1, 8)), (None, torch.tensor([[1, 2], [1, 2]])))
    heads = Heads(4, 2, 64, RotaryChannels("half-split", 64))
    inside["manifest"] |= {"schema": 3, "attention": attention_section(sparse, heads, "0" * 64)}
    del inside["sha256"]
    (path / "sparsepack.json").write_bytes(sealed(inside))
    assert not verify(path).passed
    with pytest.raises(ArtifactError):
        open_artifact(path).stock()


@pytest.mark.parametrize("format", [{}, [], 3, None], ids=str)
def test_a_format_that_is_no_name_is_refused(format: Any) -> None:
    from sparsepack.integration.transformers.quantizer import FolderConfig

    with pytest.raises(ArtifactError, match="expected one of slide"):
        FolderConfig(format)


def test_attention_of_other_heads_than_the_folders_is_found(slid: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(slid["slide-int8"], tmp_path / "s"))
    inside = unsealed(path / "sparsepack.json")
    sparse = SparseAttention(TokenPolicy(Fraction(1, 8)), (None, torch.tensor([[1, 2]])))
    heads = Heads(4, 1, 64, RotaryChannels("half-split", 64))
    inside["manifest"] |= {"schema": 3, "attention": attention_section(sparse, heads, "0" * 64)}
    del inside["sha256"]
    (path / "sparsepack.json").write_bytes(sealed(inside))
    (problem,) = verify(path).problems
    assert "attention: kv_heads 1, the model has 2; pack the model again" in problem
    with pytest.raises(ArtifactError, match="kv_heads 1, the model has 2"):
        open_artifact(path).stock()
