"""The neuron GGUF: what is written is read back in any order, other programs show it truthfully, others are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from artifacts_for_tests import neuron_counts, plan_neurons
from codec_cases import relative_error
from forged import edited, forge, named
from models_for_tests import make_model

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.formats.containers.gguf import MANIFEST
from sparsepack.formats.inspect import describe
from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.orders import neuron as neurons
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import NeuronMlp
from sparsepack.formats.plan import PlannedGroup
from sparsepack.formats.stock import dequantised
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.sites import SiteRule

pytestmark = pytest.mark.filterwarnings("error:The given NumPy array is not writable")

RELU = {"hidden_act": "relu", "intermediate_size": 300}


@pytest.fixture(scope="module", params=["qwen2", "arcee"])
def relu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model with ReLU, and one with its square, without gates."""
    changes = RELU if request.param == "qwen2" else {"intermediate_size": 300}
    return open_checkpoint(make_model(tmp_path_factory.mktemp("relu") / "m", request.param, **changes))


@pytest.fixture(scope="module")
def file(relu: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "m.gguf"
    plan_neurons(relu, {(1, "attn_out"): SiteRule(torch.tensor(0.25))}).write(path)
    return path


@pytest.fixture(scope="module")
def by_rows(relu: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "m.gguf"
    plan_neurons(relu, gates="rows").write(path)
    return path


def test_every_tensor_comes_back_within_its_types_error(relu: Checkpoint, file: Path) -> None:
    tensor = dequantised(read_packed(file))
    for source in relu.source.shapes:
        found, expected = tensor(source), relu.tensor(source).float()
        assert found.shape == expected.shape
        assert relative_error(found, expected) < (0.09 if expected.dim() == 2 else 1e-7), source


def test_neurons_stand_by_falling_frequency(relu: Checkpoint, file: Path) -> None:
    counts, packed = neuron_counts(relu), read_packed(file)
    for layer, block in zip(counts.active, packed.layers, strict=True):
        stored = block.mlp
        assert isinstance(stored, NeuronMlp)
        assert torch.equal(stored.order, neurons.by_frequency(layer))
        assert torch.equal(stored.frequency, (layer[stored.order].double() / 1000).float())
        assert (stored.frequency[0], stored.frequency[-1]) == (1, 0)
    assert packed.manifest["neurons"] == {
        "calibration": "ab" * 32,
        "tokens": 1000,
        "density": [pytest.approx(float(layer.double().mean() / 1000)) for layer in counts.active],
    }
    assert set(packed.rules) == {(1, "attn_out")}


def test_down_columns_are_those_in_zigzag_order_byte_for_byte(relu: Checkpoint, file: Path) -> None:
    for layer, block in enumerate(read_packed(file).layers):
        assert isinstance(block.mlp, NeuronMlp)
        (down,), (gate, *ups) = relu.projections(layer, "mlp_mid"), relu.projections(layer, "mlp_in")
        columns = zigzag.pack(down)[:, block.mlp.order].transpose(0, 1).reshape(300, -1)
        assert torch.equal(block.mlp.records.blocks[:, 144 * len(ups) :], columns)
        assert relative_error(decode_matrix(block.mlp.gate), gate[block.mlp.order].float()) < 0.12


def test_gguf_py_dequantises_records_and_gate_truthfully(relu: Checkpoint, file: Path) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for layer in range(2):
        gate, *ups = relu.projections(layer, "mlp_in")
        (down,) = relu.projections(layer, "mlp_mid")
        order = torch.from_numpy(stored[f"blk.{layer}.mlp_order"].data.copy()).long()
        tensor = stored[f"blk.{layer}.mlp_records.weight"]
        theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        packed = read_packed(file).layers[layer].mlp
        assert isinstance(packed, NeuronMlp)
        assert torch.equal(theirs, decode_matrix(packed.records))
        assert relative_error(theirs, torch.cat([*(up[order] for up in ups), down.t()[order]], 1).float()) < 0.09
        bands, tail = (
            torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            for tensor in (stored[f"blk.{layer}.mlp_gate.weight"], stored[f"blk.{layer}.mlp_gate.tail.weight"])
        )
        theirs = torch.cat([bands.transpose(1, 2).reshape(-1, 256), tail.view(256, 64)[:, : 300 - 256].t()])
        assert torch.equal(theirs, decode_matrix(packed.gate))
        assert relative_error(theirs, gate[order].float()) < 0.09


def test_gates_by_rows_are_ordinary_rows_of_the_same_neurons(relu: Checkpoint, file: Path, by_rows: Path) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(by_rows).tensors}
    for layer, (found, other) in enumerate(zip(read_packed(by_rows).layers, read_packed(file).layers, strict=True)):
        assert isinstance(found.mlp, NeuronMlp)
        assert isinstance(other.mlp, NeuronMlp)
        assert (str(found.mlp.gate.format), str(other.mlp.gate.format)) == ("Q4_K", "zigzag-q4_k")
        assert torch.equal(found.mlp.order, other.mlp.order)
        assert torch.equal(found.mlp.records.blocks, other.mlp.records.blocks)
        tensor = stored[f"blk.{layer}.mlp_gate.weight"]
        theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(theirs, decode_matrix(found.mlp.gate))
        gate = relu.projections(layer, "mlp_in")[0]
        assert relative_error(theirs, gate[found.mlp.order].float()) < 0.09
    report = verify(by_rows, relu)
    assert report.passed, report.problems
    assert describe(by_rows)["neurons"]["gates"] == "rows"
    assert describe(file)["neurons"]["gates"] == "zigzag"


def test_it_is_verified_against_its_model_and_no_other(relu: Checkpoint, file: Path, tmp_path: Path) -> None:
    report = verify(file, relu)
    assert report.passed, report.problems
    assert {t.name for t in report.tensors if ".mlp_" in t.name} == {
        f"blk.{n}.mlp_{what}.weight" for n in range(2) for what in ("gate", "gate.tail", "records", "norm")
    }
    family, changes = relu.family.model_type, RELU if relu.family.gated else {"intermediate_size": 300}
    other = open_checkpoint(make_model(tmp_path / "other", family, seed=1, **changes))
    problems = verify(file, other).problems
    assert any("blk.0.mlp_records.weight: relative error" in problem for problem in problems)
    wider = open_checkpoint(make_model(tmp_path / "wider", family, **{**changes, "intermediate_size": 301}))
    assert any("mlp_records.weight" in problem for problem in verify(file, wider).problems)


def test_a_damaged_or_truncated_file_is_noticed(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    (tmp_path / "short.gguf").write_bytes(data[:-1000])
    assert "truncated" in verify(tmp_path / "short.gguf").problems[0]
    data[open_artifact(file).tensors["blk.1.mlp_records.weight"].start + 5] ^= 1
    (tmp_path / "bit.gguf").write_bytes(data)
    assert "blk.1.mlp_records.weight does not match" in verify(tmp_path / "bit.gguf").problems[0]


def test_inspect_says_how_dense_neurons_are(relu: Checkpoint, file: Path) -> None:
    description = describe(file)
    assert description["neurons"]["tokens"] == 1000
    assert description["neurons"]["mean_density"] == pytest.approx(0.5, abs=0.05)
    assert "active at a token of the calibration (1,000 tokens" in description["neurons"]["in_words"]
    assert description["weights"] == sum(torch.Size(shape).numel() for shape in relu.source.shapes.values())
    assert description["runs"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no zeros": ({"hidden_act": "silu"}, "activation 'silu': its neurons are never exactly inactive"),
    "odd width": ({"hidden_act": "relu", "hidden_size": 320}, "hidden size 320: neuron records need a multiple of 256"),
    "biases": ({"hidden_act": "relu", "mlp_bias": True}, "biases at mlp_in"),
    "blocks alone": (
        {"family": "nemotron_h", "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        "blocks without an MLP: neurons are stored of every block",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_stored_so_are_refused(tmp_path: Path, case: str) -> None:
    changes, said = REFUSED[case]
    checkpoint = open_checkpoint(make_model(tmp_path / "m", **changes))
    with pytest.raises(PackingError, match=said) as caught:
        FORMATS["neuron-q4_k"].check_model(checkpoint)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_the_model_is_refused(relu: Checkpoint) -> None:
    counts = neuron_counts(relu)
    with pytest.raises(PackingError, match="give --calibration"):
        plan_neurons(relu, neurons=None)
    with pytest.raises(PackingError, match=r"counted the neurons \[1, 300\]"):
        plan_neurons(relu, neurons=dataclasses.replace(counts, active=counts.active[:1]))
    with pytest.raises(PackingError, match="expected 0 to 999 tokens each"):
        plan_neurons(relu, neurons=dataclasses.replace(counts, tokens=999))
    with pytest.raises(PackingError, match=r"blk\.0\.mlp_mid: neuron-q4_k skips neurons exactly"):
        plan_neurons(relu, {(0, "mlp_mid"): SiteRule(torch.tensor(0.1))})
    plan_neurons(relu, {(0, "mlp_mid"): SiteRule()})  # dense


def changed(group: PlannedGroup, name: str, value: torch.Tensor) -> PlannedGroup:
    if group.tensors[0].name != name:
        return group
    return dataclasses.replace(group, produce=lambda: (value.contiguous().view(torch.uint8),))


TWICE = torch.arange(300, dtype=torch.int32).clamp_min(1)
FORGED = {
    "no section": ({"neurons": None}, {}, "neurons: .*pack the model again"),
    "another section": ({"neurons": {"tokens": "many"}}, {}, "neurons: tokens: Input should be a valid integer"),
    "other layers": (
        {"neurons": {"calibration": "a", "tokens": 1, "density": [0.5]}},
        {},
        "density of 1 layers, the model has 2",
    ),
    "no permutation": ({}, {"blk.1.mlp_order": TWICE}, "blk.1.mlp_order: .*each of 300 neurons once"),
    "rising frequency": ({}, {"blk.0.mlp_frequency": torch.linspace(0, 1, 300)}, "expected shares from 1 to 0"),
    "no frequency": ({}, {"blk.0.mlp_frequency": torch.full((300,), float("nan"))}, "expected shares from 1 to 0"),
}


@pytest.mark.parametrize("case", FORGED)
def test_inconsistent_files_are_refused(relu: Checkpoint, tmp_path: Path, case: str) -> None:
    manifest, tensors, said = FORGED[case]
    plan: Any = plan_neurons(relu)
    groups = plan.groups
    for name, value in tensors.items():
        groups = tuple(changed(group, name, value) for group in groups)
    values = edited(dict(plan.values), MANIFEST, **manifest)
    forge(plan, values=values, groups=groups).write(tmp_path / "m.gguf")
    with pytest.raises(ArtifactError, match=said) as caught:
        read_packed(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
    assert not verify(tmp_path / "m.gguf").passed


def test_tensors_that_it_should_not_have_are_refused(relu: Checkpoint, tmp_path: Path) -> None:
    plan: Any = plan_neurons(relu)
    norm = next(group for group in plan.groups if group.tensors[0].name == "output_norm.weight")
    for name in ("blk.0.mlp_gate.threshold", "blk.0.mlp.order", "blk.0.mlp_in.weight"):
        forge(plan, groups=(*plan.groups, named(norm, name))).write(tmp_path / "m.gguf", overwrite=True)
        with pytest.raises(ArtifactError, match=f"{name} is not understood"):
            read_packed(tmp_path / "m.gguf")
