"""Every family that can be rotated computes the same in another basis, whatever its heads, biases and ties."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_variants import FOLDERS
from models_for_tests import EXPERTS, OPT, ROTATED, make_model, make_opt, row

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.rotated import Bases, bases_of, found_basis, rotated, value_and_output
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import HEAD
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.hf_model.model import load_model

IDS = torch.arange(2, 50)[None] * 7 % 512
MORE: dict[str, dict[str, Any]] = {
    "odd width": {"family": "llama", "hidden_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1},
    "narrow, tied, head of another size": {"family": "mistral", "hidden_size": 48, "tie_word_embeddings": True},
}

LIKE_OTHERS = ("llama", "mistral, no window", "qwen2", "qwen2, every second layer slides", "odd width")
SOME = [pytest.param(name, marks=[pytest.mark.long][: name in LIKE_OTHERS]) for name in (*FOLDERS, *MORE)]


def some_basis(hidden: int, seed: int = 0) -> torch.Tensor:
    """A random orthogonal matrix."""
    made = torch.randn(hidden, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis: torch.Tensor = torch.linalg.qr(made).Q
    return basis


def one_basis(hidden: int) -> Bases:
    """The same, of all blocks."""
    return Bases(matrices=(some_basis(hidden),))


def some_values(model: Checkpoint) -> tuple[torch.Tensor, ...]:
    """Random orthogonal matrices for the values of each KV head."""
    heads = heads_of_config(model.config)
    seeds = [range(1 + layer * heads.kv_heads, 1 + (layer + 1) * heads.kv_heads) for layer in range(model.layers)]
    return tuple(torch.stack([some_basis(heads.head_dim, seed) for seed in of_block]) for of_block in seeds)


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    """What stock transformers makes of it, in float32."""
    with torch.inference_mode():
        found: torch.Tensor = load_model(checkpoint)(IDS).logits
    return found


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", [*FOLDERS, *MORE])
def test_the_same_function(name: str, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", **{**FOLDERS, **MORE}[name]))
    basis = some_basis(model.config.hidden_size)
    turned = rotated(model, Bases(matrices=(basis,)))
    assert off(logits(turned), logits(model)) < 1e-5
    assert not turned.tied
    assert turned.source.shapes[HEAD] == turned.source.shapes[model.family.embedding]
    assert {turned.tensor(name).dtype for name in turned.source.shapes} == {torch.float32}
    embedding = model.tensor(model.family.embedding).double()
    assert off(turned.tensor(model.family.embedding), embedding @ basis) < 1e-6
    norms = [name for name in turned.source.shapes if name.endswith(("layernorm.weight", "model.norm.weight"))]
    assert len(norms) == 2 * model.layers + 1
    assert all(torch.equal(turned.tensor(norm), torch.ones(model.config.hidden_size)) for norm in norms)
    assert turned.sha256 == model.sha256


@pytest.mark.parametrize("name", SOME)
def test_segments_are_the_same_function(name: str, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", **({**FOLDERS, **MORE}[name] | {"num_hidden_layers": 4})))
    hidden = model.config.hidden_size
    bases = Bases((0, 1, 3), tuple(some_basis(hidden, seed) for seed in range(3)), some_values(model))
    turned = rotated(model, bases)
    assert turned.bases == (1, 3)
    assert off(logits(turned), logits(model)) < 1e-5
    change = turned.tensor("model.layers.3.residual_basis.weight")
    assert (change.dtype, turned.source.shapes["model.layers.3.residual_basis.weight"]) == (
        torch.float32,
        (hidden, hidden),
    )
    assert off(change, bases.matrices[2].t() @ bases.matrices[1]) < 1e-6
    assert off(turned.tensor(HEAD), rotated(model, Bases(matrices=bases.matrices[2:])).tensor(HEAD)) == 0
    with pytest.raises(CheckpointError, match="rotated already, its residual stream changes its basis before block 1"):
        rotated(turned, bases)


@pytest.mark.parametrize("name", SOME)
def test_values_alone_are_the_same_function(name: str, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", **{**FOLDERS, **MORE}[name]))
    turned = rotated(model, Bases(values=some_values(model)))
    assert off(logits(turned), logits(model)) < 1e-5
    heads, folded = heads_of_config(model.config), rotated(model, Bases())
    changed = {tensor for tensor in turned.source.shapes if off(turned.tensor(tensor), folded.tensor(tensor)) > 0.1}
    of_heads = {name for layer in range(model.layers) for name in value_and_output(model.family, layer)}
    weights = {f"{name}.weight" for name in of_heads}
    assert weights <= changed <= weights | {f"{name}.bias" for name in of_heads if "v_proj" in name}
    value, output = value_and_output(model.family, 1)
    head, group = heads.kv_heads - 1, heads.heads // heads.kv_heads
    last = len(folded.tensor(f"{value}.weight")) - (heads.kv_heads - 1 - head) * heads.head_dim
    rows = slice(last - heads.head_dim, last)  # of v's, which may stand behind q and k
    columns = slice(head * group * heads.head_dim, (head * group + 1) * heads.head_dim)
    basis = some_values(model)[1][head].float()
    assert off(turned.tensor(f"{value}.weight")[rows], basis.t() @ folded.tensor(f"{value}.weight")[rows]) < 1e-6
    expected = folded.tensor(f"{output}.weight")[:, columns] @ basis
    assert off(turned.tensor(f"{output}.weight")[:, columns], expected) < 1e-6


@pytest.mark.parametrize("family", [name for name in EXPERTS if row(name).residual is not None])
def test_mixtures_are_the_same_function(family: str, tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", family, num_hidden_layers=3))
    bases = Bases((0, 2), tuple(some_basis(model.config.hidden_size, seed) for seed in range(2)), some_values(model))
    turned = rotated(model, bases)
    assert off(logits(turned), logits(model)) < 1e-5
    experts = model.family.experts
    assert experts is not None
    block, norm = model.family.block(2), model.tensor(f"{model.family.block(2)}.post_attention_layernorm.weight")
    routers = [experts.router, *([] if experts.shared is None else [experts.shared.gate])]
    for name in [f"{router}.weight" for router in routers] + [experts.parameters[0]]:
        expected = model.tensor(f"{block}.{name}").double() * norm.double() @ bases.matrices[1]
        assert off(turned.tensor(f"{block}.{name}"), expected) < 1e-6
    down = f"{block}.{experts.parameters[1]}"
    assert off(turned.tensor(down), bases.matrices[1].t() @ model.tensor(down).double()) < 1e-6


def test_bases_are_kept_by_name() -> None:
    bases = Bases((0, 3), (some_basis(8), some_basis(8, 1)), tuple(some_basis(4, n)[None] for n in range(12)))
    again = bases_of(dict(reversed(bases.tensors().items())))
    assert again.starts == bases.starts
    for ours, theirs in ((again.matrices, bases.matrices), (again.values, bases.values)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_before_bases_are_known_nothing_is_turned(tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m"))
    folded = rotated(model, Bases((0, 1)))
    assert folded.bases == (1,)
    assert torch.equal(folded.tensor("model.layers.1.residual_basis.weight"), torch.eye(256))
    assert off(logits(folded), logits(model)) < 1e-6


def test_changes_of_basis_are_stored_in_the_type_of_the_matrices(tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m"))
    bases = Bases((0, 1), (some_basis(256), some_basis(256, 1)))
    for weights, kept in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert rotated(model, bases, weights).tensor("model.layers.1.residual_basis.weight").dtype == kept


@pytest.mark.parametrize("name", [*ROTATED, "llama, biases"])
def test_what_lies_within_a_block_stays(name: str, tmp_path: Path) -> None:
    """Biases and norms of queries and keys, which are outputs of their matrices; of o and down they are turned."""
    model = open_checkpoint(make_model(tmp_path / "m", **FOLDERS.get(name, {"family": name})))
    turned = rotated(model, one_basis(model.config.hidden_size))
    matrices = {f"{projection}.weight" for names in model.family.projections.values() for projection in names}
    matrices |= {
        f"{projection}.bias" for site in ("attn_out", "mlp_mid") for projection in model.family.projections[site]
    }
    folded = {f"{model.family.norms[norm]}.weight" for norm in ("attn_norm", "mlp_norm")}
    for tensor in model.source.shapes:
        within = tensor.removeprefix(f"{model.family.block(1)}.")
        if within != tensor:
            same = torch.equal(turned.tensor(tensor), model.tensor(tensor).float())
            assert same == (within not in matrices | folded), tensor


@pytest.mark.parametrize("name", OPT)
def test_norms_with_a_mean_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    model = open_checkpoint(make_opt(tmp_path / "m", **OPT[name]))
    with pytest.raises(
        CheckpointError, match=r"opt models cannot be rotated \(its norms subtract the mean.*one of llama"
    ):
        rotated(model, one_basis(model.config.hidden_size))


def test_every_family_says_whether_it_rotates() -> None:
    for family in FAMILIES.values():
        assert (family.residual is None) == bool(family.unrotatable), family.model_type
        if family.residual is not None:
            assert {*family.residual.readers, *family.residual.writers} == set(family.projections)
            assert set(family.residual.readers.values()) <= set(family.norms)
            assert family.residual.last in family.after


def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_checkpoint(make_model(tmp_path / "m", **FOLDERS["llama, biases"]))
    turned = rotated(model, replace(one_basis(256), values=some_values(model)))
    whole = {name: turned.tensor(name) for name in turned.source.shapes}
    monkeypatch.setattr("sparsepack.models.checkpoint.rotated.PIECE", 1000)
    for name, expected in whole.items():
        assert off(turned.tensor(name), expected) < 1e-7, name


def test_sixteen_bits_are_kept_where_asked_for(tmp_path: Path) -> None:
    model = open_checkpoint(make_model(tmp_path / "m"))
    turned = rotated(model, one_basis(256), "bfloat16")
    assert {turned.tensor(name).dtype for name in turned.source.shapes} == {torch.bfloat16}
    assert turned.dtype == turned.config.dtype == torch.bfloat16
    assert 1e-4 < off(logits(turned), logits(model)) < 0.1


def test_what_a_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e7
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    turned = rotated(open_checkpoint(folder), one_basis(256), "float16")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has values that float16 cannot hold"):
        turned.tensor("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(("rows", "noise"), [(300, 0.0), (5000, 0.01), (600, 0.1)])
def test_the_basis_is_found_from_two_embeddings_and_says_how_surely(rows: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    basis = some_basis(48)
    sizes = torch.linspace(0.2, 3, 48, dtype=torch.float64)
    embedding = torch.randn(rows, 48, dtype=torch.float64, generator=generator) * sizes
    stored = embedding @ basis
    stored += noise * stored.square().mean().sqrt() * torch.randn(rows, 48, dtype=torch.float64, generator=generator)
    found = found_basis(zip(torch.split(embedding, 70), torch.split(stored, 70), strict=True))
    error = off(found.basis, basis)
    assert off(found.basis.t() @ found.basis, torch.eye(48)) < 1e-12
    assert found.residual == pytest.approx(noise / (1 + noise**2) ** 0.5, rel=0.1, abs=1e-6)
    assert found.uncertainty == pytest.approx(error, rel=0.15, abs=1e-6)


def test_the_orthogonal_matrix_nearest_to_a_stored_one_is_found_as_surely_as_it_is() -> None:
    """Of a mistake in such a matrix, half lies in directions that the orthogonal ones have, too."""
    noise = 0.01 / 200**0.5 * torch.randn(200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = found_basis([(torch.eye(200), some_basis(200) + noise)])
    assert found.uncertainty == pytest.approx(off(found.basis, some_basis(200)), rel=0.1)
    assert found.uncertainty == pytest.approx(0.01 / 2**0.5, rel=0.1)


def test_embeddings_that_are_not_finite_say_nothing() -> None:
    assert found_basis([(torch.ones(3, 2), torch.tensor([[1.0, 2], [float("nan"), 1], [1, 1]]))]).uncertainty == float(
        "inf"
    )


def test_directions_that_the_embedding_lacks_make_a_basis_unsure() -> None:
    embedding = torch.randn(20, 48, generator=torch.Generator().manual_seed(1))
    assert found_basis([(embedding, embedding @ some_basis(48).float())]).uncertainty == float("inf")
