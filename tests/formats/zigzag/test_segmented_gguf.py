"""Files of models whose residual stream changes its basis: what they hold, who refuses them, and what verbs say."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import plan_neurons, plan_zigzag, write_zigzag
from forged import forge
from models_for_tests import make_model
from segments_for_tests import segmented

from sparsepack.cli.commands.inspect import artifact_table, checkpoint_table
from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.inspect import describe
from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.open import read_packed
from sparsepack.formats.stock import stock_of
from sparsepack.formats.table import FORMATS, holders
from sparsepack.formats.verify import verify
from sparsepack.inspection import inspect
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.model import build_model, load_model
from sparsepack.publish.card import model_card
from sparsepack.runtime.engine import Engine

IDS = torch.randint(500, (24,), generator=torch.Generator().manual_seed(0)).tolist()


@dataclasses.dataclass(frozen=True)
class Made:
    plain: Checkpoint
    changed: Checkpoint
    file: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model, the same in segments of one, two and one blocks, and the latter's zigzag GGUF."""
    folder = tmp_path_factory.mktemp("segments")
    model = make_model(folder / "m", num_hidden_layers=4)
    changed = segmented(model, (1, 3), folder / "s")
    write_zigzag(changed, {}, folder / "m.gguf")
    return Made(open_checkpoint(model), changed, folder / "m.gguf")


def test_bases_come_back_within_their_types_error(made: Made) -> None:
    packed = read_packed(made.file)
    assert [*packed.bases] == [1, 3]
    for layer, basis in packed.bases.items():
        assert (str(basis.format), basis.rows, basis.columns) == ("Q8_0", 256, 256)
        exact = made.changed.tensor(f"model.layers.{layer}.residual_basis.weight")
        assert float((decode_matrix(basis) - exact).norm() / exact.norm()) < 0.008
    order = [*read_gguf(made.file).tensors]
    assert order.index("blk.1.basis.weight") + 1 == order.index("blk.1.attn_norm.weight")


def test_a_width_that_q8_0_does_not_fit_takes_float16(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", hidden_size=144, num_attention_heads=4)
    plan = plan_zigzag(segmented(model, (1,), tmp_path / "s"), {})
    assert {tensor.name: tensor.type for tensor in plan.tensors}["blk.1.basis.weight"] == "F16"


def test_the_stock_model_and_engines_run_the_model_from_before(made: Made) -> None:
    """But for the codec: the error that Q4_K has without any change of basis is several times larger."""
    packed = read_packed(made.file)
    stock = stock_of(packed)
    with torch.no_grad():
        model = build_model(stock.config, stock.tensor, bases=stock.bases)
        found, exact = model(torch.tensor([IDS])).logits[0], load_model(made.plain)(torch.tensor([IDS])).logits[0]
    for backend, tolerance in (("reference", 1e-3), ("cpu", 0.05)):
        logits = Engine(packed, backend=backend, dense=True).teacher_forced(IDS, 12)
        assert float((logits - found).abs().max()) < tolerance
    assert 0.05 < float((found - exact).norm() / exact.norm()) < 0.4


def test_formats_without_a_place_refuse_it_in_one_line_before_anything_is_found(made: Made) -> None:
    for name, format in FORMATS.items():
        if format.bases:
            continue
        with pytest.raises(PackingError) as caught:
            format.check_model(made.changed)
        assert str(caught.value) == (
            f"{made.changed.name}: its residual stream changes its basis before block 1, for which {name} has no "
            "place; pack as zigzag-q4_k or zigzag-q6_k or zigzag-q8_0 or zigzag-q6_p or neuron-q4_k, or rotate it with "
            "one basis"
        )
    assert (
        holders(made.changed)
        == f"formats that can hold {made.changed.name}: zigzag-q4_k, zigzag-q6_k, zigzag-q8_0, zigzag-q6_p"
    )


def test_by_neurons_it_is_the_same_function(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "m", hidden_act="relu")
    changed = segmented(plain, (1,), tmp_path / "s")
    plan_neurons(changed).write(tmp_path / "m.gguf")
    packed = read_packed(tmp_path / "m.gguf")
    assert [*packed.bases] == [1]
    assert verify(tmp_path / "m.gguf", changed).passed
    stock = stock_of(packed)
    with torch.no_grad():
        expected = build_model(stock.config, stock.tensor, bases=stock.bases)(torch.tensor([IDS])).logits[0]
    for backend, tolerance in (("reference", 1e-3), ("cpu", 0.05)):
        found = Engine(packed, backend=backend).teacher_forced(IDS, 12)
        assert float((found - expected).abs().max()) < tolerance


def test_verify_compares_every_basis_and_names_another_model(made: Made, tmp_path: Path) -> None:
    report = verify(made.file, made.changed)
    assert report.passed, report.problems
    of_bases = {tensor.name: tensor for tensor in report.tensors if "basis" in tensor.name}
    assert [*of_bases] == ["blk.1.basis.weight", "blk.3.basis.weight"]
    assert {tensor.type for tensor in of_bases.values()} == {"Q8_0"}
    problems = verify(made.file, made.plain).problems
    assert any("another model" in problem for problem in problems)
    assert any("blk.1.basis.weight: [256, 256] in the file, None" in problem for problem in problems)
    other = segmented(made.plain.path, (2, 3), tmp_path / "s")
    assert any("blk.1.basis.weight" in problem for problem in verify(made.file, other).problems)


FORGED: Mapping[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"shape": (256, 128), "logical": None}, r"blk.1.basis.weight is Q8_0 \[256, 128\]"),
    "a type that engines do not know": ({"type": "Q5_0"}, "blk.1.basis.weight is Q5_0"),
    "a block that there is not": ({"name": "blk.9.basis.weight"}, "the tensor blk.9.basis.weight is not understood"),
    "the embedding": ({"name": "basis.weight"}, "the tensor basis.weight is not understood"),
}


@pytest.mark.parametrize("case", FORGED)
def test_inconsistent_files_are_refused(made: Made, tmp_path: Path, case: str) -> None:
    changes, said = FORGED[case]
    plan = plan_zigzag(made.changed, {})
    groups = list(plan.groups)
    at = next(i for i, group in enumerate(groups) if group.tensors[0].name == "blk.1.basis.weight")
    tensor = dataclasses.replace(groups[at].tensors[0], **changes)
    bytes_ = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    groups[at] = dataclasses.replace(groups[at], tensors=(tensor,), produce=lambda: (bytes_,))
    forge(plan, groups=tuple(groups)).write(tmp_path / "m.gguf")
    with pytest.raises(ArtifactError, match=said) as caught:
        read_packed(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
    assert not verify(tmp_path / "m.gguf").passed


def test_packing_twice_gives_the_same_bytes(made: Made, tmp_path: Path) -> None:
    write_zigzag(made.changed, {}, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == made.file.read_bytes()


def test_inspect_and_the_card_say_where_the_basis_changes(made: Made) -> None:
    words = "the residual stream changes its basis before blocks 1, 3"
    description = describe(made.file)
    json.dumps(description)
    assert description["segments"] == {"bases": [1, 3], "in_words": words}
    assert f"segments: {words}" in artifact_table(description)
    assert f"| segments | {words} |" in model_card(made.file)
    assert f"segments: {words}" in checkpoint_table(inspect(made.changed.path))
    assert inspect(made.plain.path)["segments"] is None
    assert "segments:" not in checkpoint_table(inspect(made.plain.path))
