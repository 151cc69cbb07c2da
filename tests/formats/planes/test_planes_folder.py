"""The folder of planes: the weights and the levels of zigzag-q6_p, bit by bit, intact, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from folders_for_tests import sealed_again
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.errors import ArtifactError, PackingError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import Text
from sparsepack.formats.inspect import describe
from sparsepack.formats.linear_folder import block_linears, configured_linears
from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.planes import Planes, read_rule, stored_rule
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sites import SiteRule
from sparsepack.packing import Found, PackRequest, pack, plan_of

ODD = {"intermediate_size": 320, "num_key_value_heads": 1, "hidden_size": 200, "head_dim": 64, "attention_bias": True}
SECTION = {"quant_method": "sparsepack", "format": "planes-q6_p", "levels": [2, 3, 4, 5, 6], "thresholds": "steps"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model `m` of odd widths, its calibration `c`, `p.gguf` and the folder `p`: 3.4 bits read."""
    folder = tmp_path_factory.mktemp("planes")
    checkpoint = open_checkpoint(make_model(folder / "m", "llama", **ODD))
    text = Text("t", (TEXT[:8000],), "")
    calibrate(checkpoint, text, folder / "c", CalibrateOptions(context=64, samples=8, held_out=2))
    for name, format in (("p.gguf", "zigzag-q6_p"), ("p", "planes-q6_p")):
        pack(PackRequest(str(folder / "m"), folder / name, format, folder / "c", bits=3.4))
    return folder


def same(folder: Path, file: Path, model: Path) -> None:
    """Every site's weights and limits are those of the file."""
    artifact, packed = open_artifact(folder), read_packed(file)
    rules = artifact.stock().rules
    for (layer, site), names in block_linears(open_checkpoint(model)).items():
        matrix = packed.layers[layer].sites[site].matrix
        found = torch.cat([artifact.decoded(f"{name}.weight") for name in names])
        assert torch.equal(found, decode_matrix(matrix))
        assert torch.equal(artifact.decoded(f"{names[0]}.weight", 3, 70), found[3:70])
        rule = packed.layers[layer].sites[site].rule
        assert (rule is None) == ((layer, site) not in rules)
        if rule is not None:
            assert torch.equal(rules[layer, site].limits, rule.limits)


def test_it_has_the_bits_of_zigzag_with_error_feedback_and_thresholds(packed: Path) -> None:
    assert describe(packed / "p")["refit"]["quantiser"] == "gptq"
    same(packed / "p", packed / "p.gguf", packed / "m")
    found, expected = describe(packed / "p"), describe(packed / "p.gguf")
    for name in ("sparse_sites", "bits_read", "thresholds"):
        assert found[name] == expected[name]
    for name, values in expected["score"]["decode"].items():
        assert found["score"]["decode"][name] == pytest.approx(values)


def test_each_weight_rounded_by_itself_too(packed: Path, tmp_path: Path) -> None:
    for name, format in (("p.gguf", "zigzag-q6_p"), ("p", "planes-q6_p")):
        pack(PackRequest(str(packed / "m"), tmp_path / name, format))
    same(tmp_path / "p", tmp_path / "p.gguf", packed / "m")
    assert describe(tmp_path / "p")["sparse_sites"] == 0


def test_it_is_intact_and_that_model(packed: Path) -> None:
    report = verify(packed / "p", str(packed / "m"))
    assert report.passed, report.problems
    assert any(check.startswith("levels of planes, ") for check in report.checked)
    plan = plan_of(open_checkpoint(packed / "m"), PackRequest(str(packed / "m"), Path("x"), "planes-q6_p"))
    pack(PackRequest(str(packed / "m"), packed / "again", "planes-q6_p"))
    assert plan.total_bytes == describe(packed / "again")["file_bytes"]


def test_eval_measures_it_as_the_file(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = {"perplexity": (str(tmp_path / "t.txt"),), "context": 64, "windows": 2, "against": str(packed / "m")}
    found, expected = (evaluate(EvalRequest(str(packed / name), **options))["perplexity"] for name in ("p", "p.gguf"))
    for one, other in zip(found, expected, strict=True):
        assert one["kl_divergence"]["value"] == pytest.approx(other["kl_divergence"]["value"])


def test_a_changed_byte_is_found(packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed / "p", tmp_path / "p"))
    start = open_artifact(folder).tensors["model.layers.1.mlp.up_proj.weight_threshold"].start
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(start)
        (byte,) = file.read(1)
        file.seek(start)
        file.write(bytes([byte ^ 1]))
    assert not verify(folder).passed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"levels": [2, 4, 6]}, r"levels: \[2, 4, 6\], this version of sparsepack knows \[2, 3, 4, 5, 6\]; update"),
        ({"levels": None}, "levels: None"),
        ({"thresholds": "router"}, "thresholds: router, this version of sparsepack knows steps; update"),
        ({"precision": 3}, "precision: this version of sparsepack does not know it; update"),
        ({"linears": "all"}, "linears: expected a list of names"),
        ({"format": "planes-q9_p"}, "expected one of slide-int8.*update sparsepack"),
    ],
)
def test_what_this_version_does_not_know_is_one_line(change: dict[str, Any], said: str) -> None:
    assert configured_linears({**SECTION, "linears": ["a"]}) == {"a": Planes()}
    with pytest.raises(ArtifactError, match=said) as caught:
        configured_linears({**SECTION, "linears": ["a"], **change})
    assert "\n" not in str(caught.value)


def test_a_folder_of_other_levels_does_not_open(packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed / "p", tmp_path / "p"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["levels"] = [3, 6]
    sealed_again(folder, "config.json", json.dumps(config))
    with pytest.raises(ArtifactError, match=r"levels: \[3, 6\]"):
        open_artifact(folder)


def test_linears_of_a_site_with_other_thresholds_are_refused(packed: Path) -> None:
    artifact = open_artifact(packed / "p")
    names = {name: artifact.tensors[name] for name in artifact.tensors}
    wrong, right = (f"model.layers.0.{name}.weight_threshold" for name in ("mlp.up_proj", "self_attn.q_proj"))
    names[wrong] = names[right]
    other = replace(artifact, folder=replace(artifact.folder, tensors=names))
    with pytest.raises(ArtifactError, match=r"up_proj has other thresholds than \S*gate_proj; pack it again"):
        other.check_shapes()


def test_rows_that_pieces_do_not_divide_are_refused_where_a_linear_follows(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama", **{**ODD, "intermediate_size": 300})
    with pytest.raises(
        PackingError, match=r"mlp\.gate_proj: 300 rows, planes-q6_p needs a multiple of 64 where another"
    ):
        pack(PackRequest(str(model), tmp_path / "p", "planes-q6_p"))
    assert not (tmp_path / "p").exists()


def test_offsets_are_refused(packed: Path, tmp_path: Path) -> None:
    checkpoint, request = open_checkpoint(packed / "m"), PackRequest(str(packed / "m"), tmp_path / "p", "planes-q6_p")
    from sparsepack.formats.plan import PlanRequest
    from sparsepack.formats.table import format_of

    rules = {(0, "mlp_in"): SiteRule(0.1, offset=torch.zeros(200))}
    with pytest.raises(PackingError, match=r"mlp_in: offsets, for which planes-q6_p has no place"):
        format_of(request.format).plan(checkpoint, PlanRequest(rules=rules))
    assert plan_of(checkpoint, request, Found()).total_bytes > 0


def test_rules_are_stored_as_they_are() -> None:
    whole = SiteRule(torch.tensor([0.5, torch.inf, 0.0]))
    of_levels = SiteRule(torch.tensor([0.5, torch.inf, 0.0]), steps=torch.tensor([0.0, 1, 2, 3, torch.inf]))
    x = torch.tensor([[0.1, 9.0, 0.0], [0.6, 1e30, 0.1], [torch.inf] * 3])
    for rule in (whole, of_levels):
        threshold, steps = stored_rule(rule, 3)
        assert threshold.isfinite().all()
        found = (x.abs()[:, None] > read_rule(threshold, steps).limits).sum(1)
        expected = (
            x.abs()[:, None] > rule.limits if rule.of_levels else (x.abs() > rule.limits)[:, None].expand(3, 5, 3)
        )
        assert torch.equal(found, expected.sum(1))
    assert not torch.cat(stored_rule(None, 3)).any()


def test_what_transformers_and_vllm_import_of_it_reads_no_gguf() -> None:
    code = "import sys, sparsepack.integration.transformers.linears; print('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"
