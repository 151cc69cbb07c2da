"""The zigzag GGUF: what is written is read back, other programs show it truthfully or refuse it."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from artifacts_for_tests import plan_zigzag, write_plain, write_zigzag
from codec_cases import relative_error
from forged import edited, forge, named
from models_for_tests import END, make_model, tokenizer
from small_rules import rules

from sparsepack.errors import ArtifactError, OutputError, PackingError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.containers.gguf import MANIFEST as KEY
from sparsepack.formats.containers.gguf import string, u32
from sparsepack.formats.matrix import decode_matrix, zigzag_rows
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.orders import zigzag as codec
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.plan import PlannedGroup
from sparsepack.formats.stock import dequantised, stock_config, stock_tokenizer
from sparsepack.formats.verify import verify
from sparsepack.formats.zigzag import plan as zigzag
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import HEAD, SITES
from sparsepack.models.hf_config import architecture_of
from sparsepack.models.hf_model.model import build_model
from sparsepack.models.sites import SiteRule

Checkpoints, Files = dict[str, Checkpoint], dict[str, Path]
NAMES = ("llama", "mistral", "qwen2", "qwen3", "odd")

pytestmark = pytest.mark.filterwarnings("error:The given NumPy array is not writable")


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_comes_back_within_its_types_error(
    checkpoints: Checkpoints, zigzag_files: Files, name: str
) -> None:
    checkpoint, packed = checkpoints[name], read_packed(zigzag_files[name])
    tensor = dequantised(packed)
    for source in checkpoint.source.shapes:
        found, expected = tensor(source), checkpoint.tensor(source).float()
        assert found.shape == expected.shape
        assert relative_error(found, expected) < (0.09 if expected.dim() == 2 else 1e-7), source
    assert packed.architecture == architecture_of(checkpoint.config, None)
    assert packed.layers[0].sites["attn_in"].matrix.rows == checkpoint.stacked_shape("attn_in")[0]


def test_rows_after_the_whole_bands_are_a_tail_of_pieces(zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["odd"])
    matrix = packed.layers[1].sites["mlp_in"].matrix
    assert (matrix.rows, matrix.columns, tuple(matrix.blocks.shape)) == (600, 256, (2, 256, 144))
    assert matrix.tail is not None
    assert tuple(matrix.tail.shape) == (128, 144)  # two pieces of each column, four in a superblock
    padding = q4_k.decode(matrix.tail).view(256, 128)[:, 600 - 512 :]  # 8 rows share a sub-block of 32 with real ones
    assert not padding[:, 8:].any()
    assert padding.abs().max() < 0.02
    assert packed.manifest["schema"] == 6
    assert packed.manifest["tensors"]["blk.1.mlp_in.weight"] == {"shape": [512, 256], "padding_rows": 0}
    assert packed.manifest["tensors"]["blk.1.mlp_in.tail.weight"] == {"shape": [88, 256], "padding_rows": 40}


@pytest.mark.parametrize("intermediate", [32, 70, 100, 160, 352])  # of 64, 140, 200, 320 and 704 rows at mlp_in
def test_any_rows_come_back_and_cost_their_multiple_of_64(tmp_path: Path, intermediate: int) -> None:
    checkpoint = open_checkpoint(
        make_model(tmp_path / "m", "llama", intermediate_size=intermediate, num_hidden_layers=1)
    )
    write_zigzag(checkpoint, {}, tmp_path / "m.gguf")
    report = verify(tmp_path / "m.gguf", checkpoint)
    assert report.passed, report.problems
    matrix = read_packed(tmp_path / "m.gguf").layers[0].sites["mlp_in"].matrix
    rows = 2 * intermediate
    assert matrix.nbytes == -(-(rows + -rows % 64) * 256 // 256) * 144
    assert relative_error(decode_matrix(matrix), checkpoint.stacked(0, "mlp_in")[0].float()) < 0.09


def test_models_whose_rows_are_whole_bands_have_no_tails(zigzag_files: Files) -> None:
    assert not any(".tail." in name for name in read_gguf(zigzag_files["llama"]).tensors)


def test_files_of_before_tails_and_scales_of_rows_are_read(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(codec, "tail_pieces", lambda rows: 0)
        before.setattr(zigzag.planned_site, "__defaults__", (False,))
        write_zigzag(checkpoints["odd"], {}, tmp_path / "m.gguf")
    packed = read_packed(tmp_path / "m.gguf")
    assert packed.manifest["schema"] == 2
    assert packed.manifest["tensors"]["blk.1.mlp_in.weight"] == {"shape": [600, 256], "padding_rows": 168}
    matrix = packed.layers[1].sites["mlp_in"].matrix
    assert (tuple(matrix.blocks.shape), matrix.tail, matrix.row_scale) == ((3, 256, 144), None, None)
    report = verify(tmp_path / "m.gguf", checkpoints["odd"])
    assert report.passed, report.problems


def test_rules_come_back(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    given, packed = rules(checkpoints["odd"]), read_packed(zigzag_files["odd"])
    for layer, block in enumerate(packed.layers):
        for site in SITES:
            expected, found = given.get((layer, site), SiteRule()), block.sites[site].rule
            assert expected.dense == (found is None)
            if found is not None:
                assert torch.equal(found.limits, expected.limits)
                assert (expected.offset is None) == (found.offset is None)
                assert expected.offset is None or torch.equal(found.offset, expected.offset)


def test_stock_model_runs_on_the_dequantised_weights(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["qwen3"])
    config = stock_config(packed)
    # Where it was read from and in what precision it last ran are not the model's.
    described = [c.to_diff_dict() | {"_name_or_path": "", "dtype": ""} for c in (config, checkpoints["qwen3"].config)]
    assert described[0] == described[1]
    model = build_model(config, dequantised(packed))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


def test_tokenizer_inside_is_the_models(zigzag_files: Files) -> None:
    from tokenizers import Tokenizer

    inside = Tokenizer.from_str(read_packed(zigzag_files["llama"]).tokenizer_json)
    text = f"def f(x):\n\treturn 'ä' {END}"
    assert inside.encode(text).ids == tokenizer()(text)["input_ids"]


def test_matrices_are_mapped_not_copied(zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["llama"])
    file = read_gguf(zigzag_files["llama"])
    start = file.tensors["blk.0.mlp_in.weight"].start
    first = file.tensors["token_embd.weight"].start
    sites = packed.layers[0].sites
    assert sites["mlp_in"].matrix.blocks.data_ptr() - packed.embedding.blocks.data_ptr() == start - first
    assert all(sites[site].matrix.blocks.data_ptr() % 64 == 0 for site in SITES)


def test_tied_model_has_one_matrix(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["qwen3"])
    assert packed.output is packed.embedding
    assert "output.weight" not in packed.manifest["tensors"]
    assert torch.equal(dequantised(packed)(HEAD), decode_matrix(packed.embedding))


def test_gguf_py_dequantises_each_site_truthfully(checkpoints: Checkpoints, zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["odd"])
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(zigzag_files["odd"]).tensors}
    for layer in range(2):
        for site in SITES:
            tensor = stored[f"blk.{layer}.{site}.weight"]
            bands = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            matrix = packed.layers[layer].sites[site].matrix
            theirs = bands.transpose(1, 2).reshape(-1, matrix.columns)
            if matrix.tail is not None:  # of mlp_in, two pieces; of attn_in, likewise
                tensor = stored[f"blk.{layer}.{site}.tail.weight"]
                tail = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
                theirs = torch.cat([theirs, tail.view(matrix.columns, 128).t()])[: matrix.rows]
            of_rows = torch.from_numpy(stored[f"blk.{layer}.{site}.row_scale"].data.copy())
            theirs = theirs * of_rows[:, None]
            assert torch.equal(theirs, decode_matrix(matrix))
            assert relative_error(theirs, checkpoints["odd"].stacked(layer, site)[0].float()) < 0.09


def test_stock_llama_cpp_refuses_it_with_an_error(zigzag_files: Files) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the peer of this test")
    code = "import llama_cpp, sys; llama_cpp.Llama(sys.argv[1], verbose=False); print('loaded')"
    run = subprocess.run([sys.executable, "-c", code, str(zigzag_files["llama"])], capture_output=True, text=True)
    assert run.returncode == 1
    assert "Failed to load model" in run.stderr
    assert run.stdout == ""


def test_trained_model_of_odd_widths(shared: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared / "models/stories-260k")
    notes = write_zigzag(checkpoint, {}, tmp_path / "m.gguf")
    assert notes == ("token_embd.weight is Q8_0: Q6_K needs a multiple of 256 columns, it has 64",)
    packed = read_packed(tmp_path / "m.gguf")
    assert packed.manifest["notes"] == list(notes)
    assert packed.embedding.format.block == "Q8_0"
    assert packed.layers[0].sites["mlp_mid"].matrix.columns == 172
    assert packed.architecture.bos == 1
    tensor = dequantised(packed)
    worst = max(relative_error(tensor(n), checkpoint.tensor(n)) for n in checkpoint.source.shapes)
    assert worst < 0.09


@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "q4_k", "f16", "bf16", "f32"])
def test_output_and_embedding_types_are_chosen(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    write_zigzag(checkpoints["llama"], {}, tmp_path / "m.gguf", output_type=kind, embedding_type="bf16")
    packed = read_packed(tmp_path / "m.gguf")
    assert (packed.output.format.block, packed.embedding.format.block) == (kind.upper(), "BF16")
    bound = {"q8_0": 0.01, "q6_k": 0.03, "q4_k": 0.09, "f16": 1e-3}.get(kind, 0)
    assert relative_error(decode_matrix(packed.output), checkpoints["llama"].tensor(HEAD).float()) <= bound


def test_types_that_cannot_be_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(PackingError, match="tied"):
        write_zigzag(checkpoints["qwen3"], {}, path, output_type="f16", embedding_type="q6_k")
    with pytest.raises(PackingError, match="unknown type 'q5_k'"):
        write_zigzag(checkpoints["llama"], {}, path, output_type="q5_k")


def test_explicit_type_that_does_not_fit_is_refused(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(PackingError, match=r"token_embd\.weight: 64 columns, Q6_K needs a multiple of 256"):
        write_zigzag(open_checkpoint(shared / "models/stories-260k"), {}, tmp_path / "m.gguf", output_type="q6_k")


@pytest.mark.parametrize(
    ("key", "rule", "said"),
    [
        ((2, "attn_in"), SiteRule(torch.tensor(0.1)), "blk.2.attn_in: no such site"),
        ((0, "ffn"), SiteRule(), "blk.0.ffn: no such site"),
        ((0, "attn_in"), SiteRule(torch.zeros(7)), r"blk.0.attn_in: threshold \[7\], expected one number or \[256\]"),
        ((0, "attn_in"), SiteRule(torch.tensor(float("nan"))), "NaN"),
        ((0, "attn_in"), SiteRule(torch.tensor(0.1), torch.zeros(3)), r"offset \[3\], expected \[256\]"),
    ],
)
def test_rules_of_another_model_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, key: tuple[int, str], rule: SiteRule, said: str
) -> None:
    with pytest.raises(PackingError, match=said):
        write_zigzag(checkpoints["llama"], {key: rule}, tmp_path / "m.gguf")


class Spoilt:
    """A source whose tensor `name` has a NaN, or cannot be read at all."""

    file = None

    def __init__(self, source: Any, name: str, error: BaseException | None = None) -> None:
        self.inner, self.name, self.error = source, name, error
        self.shapes, self.hash = source.shapes, source.hash

    def tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.inner.tensor(name).clone()
        if name == self.name:
            if self.error:
                raise self.error
            value.view(-1)[5] = float("nan")
        return value


def test_a_row_of_large_weights_or_of_zeros_has_a_scale_of_its_own(checkpoints: Checkpoints, tmp_path: Path) -> None:
    class Uneven(Spoilt):
        def tensor(self, name: str) -> torch.Tensor:
            value: torch.Tensor = self.inner.tensor(name).clone()
            if name == self.name:
                value[3], value[4] = value[3] * 50, 0
            return value

    name = "model.layers.0.self_attn.o_proj.weight"
    uneven = dataclasses.replace(checkpoints["odd"], source=Uneven(checkpoints["odd"].source, name))
    write_zigzag(uneven, {}, tmp_path / "m.gguf")
    matrix, expected = read_packed(tmp_path / "m.gguf").layers[0].sites["attn_out"].matrix, uneven.tensor(name).float()
    assert matrix.row_scale is not None
    assert matrix.row_scale[4] == 1
    assert 30 < matrix.row_scale[3] / matrix.row_scale[5] < 80
    found = decode_matrix(matrix)
    assert relative_error(found, expected) < 0.09
    assert relative_error(found[5:32], expected[5:32]) < 0.09
    assert torch.equal(zigzag_rows(matrix, 2, 5), found[2:5])
    assert torch.equal(open_artifact(tmp_path / "m.gguf").decoded("blk.0.attn_out.weight", 2, 5), found[2:5])


@pytest.mark.parametrize("name", ["layers.1.self_attn.k_proj.weight", "embed_tokens.weight", "norm.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    source = Spoilt(checkpoints["llama"].source, f"model.{name}")
    spoilt = dataclasses.replace(checkpoints["llama"], source=source)
    where = {"l": "blk.1.attn_in.weight", "e": "token_embd.weight", "n": "output_norm.weight"}[name[0]]
    with pytest.raises(PackingError, match=f"^{where}: .*1 of .* NaN"):
        write_zigzag(spoilt, {}, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_nothing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = Spoilt(checkpoints["llama"].source, "model.layers.1.mlp.down_proj.weight", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_zigzag(dataclasses.replace(checkpoints["llama"], source=source), {}, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_kept_unless_told_otherwise(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("precious")
    with pytest.raises(OutputError, match="--overwrite"):
        write_zigzag(checkpoints["llama"], {}, path)
    assert path.read_text() == "precious"
    write_zigzag(checkpoints["llama"], {}, path, overwrite=True)
    assert read_packed(path).architecture.layers == 2


def test_packing_twice_gives_the_same_bytes(checkpoints: Checkpoints, zigzag_files: Files, tmp_path: Path) -> None:
    write_zigzag(checkpoints["odd"], rules(checkpoints["odd"]), tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == zigzag_files["odd"].read_bytes()


def test_provenance_is_in_the_manifest(checkpoints: Checkpoints, tmp_path: Path) -> None:
    table = {
        "allocation": "uniform",
        "criterion": "magnitude",
        "sparsity": 0.5,
        "upstream": "sparse",
        "rows": [{"layer": 0, "site": "attn_in", "sparsity": 0.5, "threshold": 0.1}],
    }
    provenance = {
        "calibration": {"sha256": "ab" * 32},
        "recipe": {"pack": {"format": "zigzag-q4_k"}},
        "anything": [{"a caller": "knows"}],
        "thresholds": table,
    }
    write_zigzag(checkpoints["llama"], {}, tmp_path / "m.gguf", provenance=provenance)
    manifest = read_packed(tmp_path / "m.gguf").manifest
    assert {name: manifest[name] for name in provenance} == provenance
    assert manifest["model"]["sha256"] == checkpoints["llama"].sha256
    with pytest.raises(ValueError, match="the manifest has keys of its own by that name"):
        write_zigzag(checkpoints["llama"], {}, tmp_path / "n.gguf", provenance={"neurons": table})


def forged(checkpoint: Checkpoint, path: Path, change: Any) -> Path:
    """A zigzag file with intact hashes that says something else."""
    plan = plan_zigzag(checkpoint, {})
    values, groups = change(dict(plan.values), list(plan.groups))
    forge(plan, values=values, groups=tuple(groups)).write(path)
    return path


def renamed(groups: list, old: str, new: str) -> list:
    return [named(group, new) if group.tensors[0].name == old else group for group in groups]


def scaled(groups: list, value: float, rows: int = 512) -> list:
    """The tensors of a file whose first site has another scale for its last row, or for so many rows."""
    at = next(n for n, group in enumerate(groups) if group.tensors[-1].name == "blk.0.attn_in.row_scale")
    scales = torch.ones(rows)
    scales[-1] = value
    tensors = (*groups[at].tensors[:-1], dataclasses.replace(groups[at].tensors[-1], shape=(rows,)))
    data = [*groups[at].produce()[:-1], scales.view(torch.uint8)]
    return [*groups[:at], PlannedGroup(tensors, lambda: data), *groups[at + 1 :]]


NUMBERS = "sparsepack.architecture"
FORGED = {
    "newer schema": (lambda v, t: (edited(v, KEY, schema=7), t), "schema 7 .* update sparsepack"),
    "attention of another kind": (
        lambda v, t: (edited(v, KEY, attention={"kept": 0.1}), t),
        "attention.kind: Field req",
    ),
    "unknown kind": (lambda v, t: (edited(v, KEY, kind="zigzag-q9"), t), "unknown kind 'zigzag-q9'"),
    "other kind": (lambda v, t: (edited(v, KEY, kind="q4_k"), t), "plain Q4_K GGUF"),
    "no manifest": (lambda v, t: ({k: x for k, x in v.items() if k != KEY}, t), "manifest is missing"),
    "no shapes": (lambda v, t: (edited(v, KEY, tensors={}), t), "logical shape None"),
    "missing tensor": (lambda v, t: (v, t[:-1]), "output.weight is missing"),
    "unknown tensor": (lambda v, t: (v, renamed(t, "output.weight", "x")), "output.weight is missing"),
    "extra tensor": (lambda v, t: (v, [*t, named(t[-1], "x")]), "x is not understood"),
    "other width": (lambda v, t: (edited(v, NUMBERS, intermediate=100), t), "the architecture means Q4_K"),
    "no numbers": (lambda v, t: (edited(v, NUMBERS, layers="two"), t), "layers 'two'"),
    "many layers": (lambda v, t: (edited(v, NUMBERS, layers=10**12), t), "layers 10000*0, expected"),
    "words for numbers": (lambda v, t: (edited(v, NUMBERS, inv_freq=["x"] * 32), t), "something else than numbers"),
    "words for windows": (lambda v, t: (edited(v, NUMBERS, sliding_windows=["x", 0]), t), "something else than integ"),
    "unknown number": (lambda v, t: (edited(v, NUMBERS, mysteries=8), t), "mysteries"),
    "experts that are no numbers": (lambda v, t: (edited(v, NUMBERS, experts=8), t), "experts are 8, expected"),
    "experts of a dense model": (
        lambda v, t: (edited(v, NUMBERS, experts={"count": 8, "used": 2, "normalised": True}), t),
        "in a llama model",
    ),
    **{
        f"a scale of a row that is {value}": (lambda v, t, value=value: (v, scaled(t, value)), "not a positive number")
        for value in (0.0, -1.0, float("nan"), float("inf"))
    },
    "scales of other rows": (lambda v, t: (v, scaled(t, 1.0, 511)), r"row_scale is F32 \[511\], .* \[512\]"),
    "a vector of no format": (
        lambda v, t: (v, [*t, named(t[-2], "blk.0.attention.heavy_channels")]),
        "the tensor blk.0.attention.heavy_channels is not understood",
    ),
    "neurons": (
        lambda v, t: (edited(v, KEY, neurons={"order": "activity"}), t),
        "zigzag-q4_k has no place for neurons",
    ),
    "another width in the configuration": (
        lambda v, t: (edited(v, "sparsepack.config", hidden_size=512), t),
        r"contradict each other \(hidden_size is 512 in config.json, 256 for engines\)",
    ),
    "another norm in the configuration": (lambda v, t: (edited(v, "sparsepack.config", rms_norm_eps=0.5), t), "rms_n"),
    "another head in the configuration": (
        lambda v, t: (edited(v, "sparsepack.config", tie_word_embeddings="yes"), t),
        "tie_word_embeddings is yes",
    ),
    "older schema": (lambda v, t: (edited(v, KEY, schema=1), t), "schema '1'"),
    "unknown family": (lambda v, t: (edited(v, NUMBERS, model_type="opt"), t), "'opt'"),
}


@pytest.mark.parametrize("case", FORGED)
def test_inconsistent_files_are_refused(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    change, said = FORGED[case]
    path = forged(checkpoints["llama"], tmp_path / "m.gguf", change)
    with pytest.raises(ArtifactError, match=said) as caught:
        read_packed(path)
    assert "\n" not in str(caught.value)
    assert not verify(path).passed


def test_verify_and_eval_find_rotary_frequencies_that_the_configuration_does_not_mean(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    path = forged(checkpoints["llama"], tmp_path / "m.gguf", lambda v, t: (edited(v, "sparsepack.config", **rope), t))
    (problem,) = verify(path).problems
    assert "means another model than its tensors are (inv_freq is" in problem
    with pytest.raises(ArtifactError, match="another model"):
        open_artifact(path).stock()


def test_configuration_that_is_not_understood_is_refused(zigzag_files: Files) -> None:
    packed = read_packed(zigzag_files["llama"])
    for text in ("{", "[]", '{"model_type": "no such"}', '{"model_type": "llama", "hidden_size": "wide"}'):
        with pytest.raises(ArtifactError, match=r"config\.json inside the artifact is not understood"):
            stock_config(dataclasses.replace(packed, config_json=text))


def test_names_that_the_model_does_not_have_are_refused(zigzag_files: Files) -> None:
    packed: PackedModel = read_packed(zigzag_files["llama"])
    with pytest.raises(ArtifactError, match="no such tensor"):
        dequantised(packed)("model.layers.2.mlp.up_proj.weight")


# chat templates

TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


def test_the_chat_template_is_carried_from_folders_and_ggufs(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_zigzag(open_checkpoint(folder), {}, tmp_path / "m.gguf")
    assert read_gguf(tmp_path / "m.gguf").metadata["tokenizer.chat_template"] == TEMPLATE
    packed = read_packed(tmp_path / "m.gguf")
    assert packed.chat_template == stock_tokenizer(packed).chat_template == TEMPLATE
    write_plain(open_checkpoint(folder), tmp_path / "f16.gguf", "f16")
    write_zigzag(open_checkpoint(tmp_path / "f16.gguf"), {}, tmp_path / "again.gguf")
    assert read_packed(tmp_path / "again.gguf").chat_template == TEMPLATE


def test_a_model_without_one_gives_the_file_that_it_always_gave(tmp_path: Path) -> None:
    write_zigzag(open_checkpoint("shipped:tiny"), {}, tmp_path / "m.gguf")
    assert "tokenizer.chat_template" not in read_gguf(tmp_path / "m.gguf").metadata
    assert read_packed(tmp_path / "m.gguf").chat_template is None


def test_a_template_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zigzag, "chat_template", lambda checkpoint: "x")
    monkeypatch.setattr(zigzag, "string", lambda value: u32(7) if value == "x" else string(value))
    forge(plan_zigzag(open_checkpoint("shipped:tiny"), {})).write(tmp_path / "m.gguf")
    with pytest.raises(ArtifactError, match=r"tokenizer\.chat_template is no text"):
        read_packed(tmp_path / "m.gguf")


def test_a_tail_that_is_missing_or_of_rows_that_have_none_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def without_tail(group: PlannedGroup) -> PlannedGroup:
        return PlannedGroup(group.tensors[:1], lambda: group.produce()[:1])

    plan = plan_zigzag(checkpoints["odd"], {})
    groups = tuple(without_tail(g) if g.tensors[0].name == "blk.1.mlp_in.weight" else g for g in plan.groups)
    forge(plan, groups=groups).write(tmp_path / "missing.gguf")
    with pytest.raises(
        ArtifactError, match=r"blk\.1\.mlp_in\.weight is .* the architecture means Q4_K \[3, 256, 256\]"
    ):
        read_packed(tmp_path / "missing.gguf")
    plan = plan_zigzag(checkpoints["llama"], {})
    groups = (*plan.groups, named(plan.groups[-1], "blk.0.attn_in.tail.weight"))
    forge(plan, groups=groups).write(tmp_path / "more.gguf")
    with pytest.raises(ArtifactError, match=r"blk\.0\.attn_in\.tail\.weight is not understood"):
        read_packed(tmp_path / "more.gguf")
