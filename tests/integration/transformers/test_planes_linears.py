"""A folder of planes in transformers: the engine's tokens, prompts with all planes, copies, and what is refused."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folders_for_tests import sealed_again
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.errors import ArtifactError
from sparsepack.files.text import Text
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.integration.transformers.linears import PlanesLinear
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime import planes_operator
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `p` and the file `p.gguf` of a random model, of which a token reads 2.8 bits."""
    folder = tmp_path_factory.mktemp("planes")
    model = str(
        make_model(folder / "m", "llama", hidden_size=200, head_dim=64, attention_bias=True, intermediate_size=448)
    )
    calibrate(model, Text("t", (TEXT[:8000],), ""), folder / "c", CalibrateOptions(context=64, samples=8))
    for name, format in (("p.gguf", "zigzag-q6_p"), ("p", "planes-q6_p")):
        pack(PackRequest(model, folder / name, format, folder / "c", bits=2.8, score=False))
    return folder


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(planes_operator, "has_kernels", lambda: False)
    elif not planes_operator.has_kernels():
        pytest.skip("the kernels were not built")
    return bool(request.param)


def loaded(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **options})


@torch.inference_mode()
def steps(model: Any) -> torch.Tensor:
    """Logits of a prompt, then of tokens one by one."""
    found, cache = [], None
    for part in (IDS[:, :20], *IDS[:, 20:].split(1, 1)):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1])
    return torch.stack(found)


def test_tokens_one_by_one_have_the_engines_logits(packed: Path, kernels: bool) -> None:
    engine = Engine(read_packed(packed / "p.gguf"), EngineOptions(backend="cpu" if kernels else "reference"))
    expected = torch.stack([engine.prefill(IDS[0, :20].tolist()), *(engine.step(int(id)) for id in IDS[0, 20:])])
    found = steps(loaded(packed / "p"))
    # Multipliers of the kernels have 8 bits, those of a site's Linears together or of each alone.
    assert (found - expected).norm() < (0.04 if kernels else 1e-3) * expected.norm()


def test_prompts_read_all_planes(packed: Path, kernels: bool) -> None:
    """And a single position after them does not."""
    model, artifact = loaded(packed / "p"), open_artifact(packed / "p")
    linear = model.model.layers[1].mlp.down_proj
    assert isinstance(linear, PlanesLinear)
    weight, x = artifact.decoded("model.layers.1.mlp.down_proj.weight"), torch.randn(2, 5, 448)
    assert torch.allclose(linear(x), x @ weight.T, atol=1e-3)
    assert not torch.allclose(linear(x[:, :1]), x[:, :1] @ weight.T, atol=1e-2)
    for one in (x[0, 0], x[0, :1], x[:, :1]):
        assert torch.allclose(linear(one).flatten()[:200], linear(x[:, :1]).flatten()[:200], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_generates_alone_and_in_batches(packed: Path, dtype: torch.dtype) -> None:
    model = loaded(packed / "p", dtype=dtype)
    assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float32
    several = torch.stack([IDS[0, :12], IDS[0, 8:20]])
    together = model.generate(several, max_new_tokens=8, do_sample=False, pad_token_id=0)
    if dtype == torch.float32:
        alone = [model.generate(row[None], max_new_tokens=8, do_sample=False, pad_token_id=0)[0] for row in several]
        assert torch.equal(together, torch.stack(alone))


def test_copies_and_saved_models_compute_the_same(packed: Path, tmp_path: Path, capfd: Any) -> None:
    model = loaded(packed / "p")
    expected = steps(model)
    assert torch.equal(steps(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert "nothing says whether its bytes are intact" in capfd.readouterr().err
    assert torch.equal(steps(again), expected)


def test_loading_says_what_runs(packed: Path, kernels: bool, capfd: Any) -> None:
    loaded(packed / "p")
    said = capfd.readouterr().err
    if kernels:
        assert "its 14 Linears in planes are copied for the CPU's kernels: 0.00 GB more" in said
    else:
        assert (
            "no kernels for its 14 Linears in planes on cpu: they are unpacked for every token, which is slow" in said
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"levels": [3, 6]}, r"levels: \[3, 6\]"), ({"thresholds": "x"}, "thresholds: x"), ({"other": 1}, "other: this")],
)
def test_what_this_version_does_not_know_is_refused(
    change: dict[str, Any], said: str, packed: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed / "p", tmp_path / "p"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    sealed_again(folder, "config.json", json.dumps(config))
    with pytest.raises(ArtifactError, match=said):
        loaded(folder)


def test_damage_is_found_before_a_token(packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed / "p", tmp_path / "p"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[open_artifact(folder).tensors["model.layers.0.mlp.up_proj.weight"].start + 77] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"up_proj\.weight does not match the SHA-256"):
        loaded(folder)
