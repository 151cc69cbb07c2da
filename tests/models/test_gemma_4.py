"""Gemma 4: what layers without a window have of their own, and which models are measured or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import AS_LLAMA_CPP, INPUTS_OF_EACH_LAYER, VOCABULARY, edit_config, make_model
from passes import by_a_stream, by_the_stock_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.table import FORMATS
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import Attention
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.gguf_config import OWN_CONFIG, gguf_config
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.model import load_model
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.free_memory import cache_bytes
from sparsepack.runtime.kv_cache import attention_shape
from sparsepack.runtime.reference.attention import DenseKvCache
from sparsepack.runtime.reference.products import route

MIXTURE = "gemma4_text, mixture"
IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", "gemma4_text"))


def test_layers_without_a_window_have_heads_of_their_own(checkpoint: Checkpoint) -> None:
    mixers = [block.mixer for block in checkpoint.architecture.blocks]
    assert [(m.kv_heads, m.head_dim, m.k_eq_v) for m in mixers if isinstance(m, Attention)] == [
        (2, 48, False),
        (2, 48, False),
        (1, 96, True),
    ]
    assert all(block.scaled for block in checkpoint.architecture.blocks)
    assert [len(checkpoint.projections(layer, "attn_in")) for layer in range(3)] == [3, 3, 2]


def test_its_numbers_come_back_from_a_file(checkpoint: Checkpoint) -> None:
    architecture = checkpoint.architecture
    check_numbers(architecture)
    assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize(
    "changes",
    [{"global_heads": (3, 96)}, {"global_heads": (1, 90)}, {"global_heads": (1,)}, {"k_eq_v": 1}],
    ids=["heads that do not divide", "too few channels", "one number", "no boolean"],
)
def test_numbers_of_no_model_are_refused(checkpoint: Checkpoint, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads|k_eq_v"):
        check_numbers(replace(checkpoint.architecture, **changes))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixture") / "m", MIXTURE)


def test_a_mixture_reads_the_stream_by_one_norm_and_is_the_stock_model(mixture: Path) -> None:
    checkpoint, stock = open_checkpoint(mixture), AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    numbers = checkpoint.architecture.experts
    assert numbers is not None
    assert (numbers.count, numbers.used, numbers.shared, numbers.normalised) == (6, 2, 2, True)
    first, second = (f"model.layers.1.pre_feedforward_layernorm{end}.weight" for end in ("", "_2"))
    assert torch.equal(checkpoint.tensor(first), checkpoint.tensor(second))
    with torch.inference_mode():
        assert torch.allclose(load_model(checkpoint)(IDS).logits, stock(IDS).logits, rtol=0, atol=1e-4)


def test_a_router_multiplies_what_experts_read(mixture: Path) -> None:
    checkpoint, stock = open_checkpoint(mixture), AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    block, x = stock.model.layers[1], torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        probabilities, weights, chosen = block.router(x)
        read = block.pre_feedforward_layernorm_2(x)
    router = checkpoint.tensor("model.layers.1.router.proj.weight")
    assert torch.allclose((read @ router.T).softmax(-1), probabilities, atol=1e-5)
    scale = checkpoint.tensor("model.layers.1.router.per_expert_scale").float()
    mine = route(read, router, 2, True, scale=scale)
    assert torch.equal(mine[0], chosen)
    assert torch.allclose(mine[1], weights, atol=1e-5)


def test_a_norm_with_zeros_loses_nothing(mixture: Path, tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    with torch.no_grad():
        stock.model.layers[0].pre_feedforward_layernorm_2.weight[[3, 77]] = 0
    stock.save_pretrained(tmp_path / "m")
    for text in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / text).write_text((mixture / text).read_text())
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensor("model.layers.0.pre_feedforward_layernorm_2.weight")[77] == 1
    assert not checkpoint.experts(0, "mlp_in")[:6, :, [3, 77]].any()
    assert checkpoint.experts(0, "mlp_in")[6:, :, [3, 77]].all()
    assert torch.equal(torch.stack([*checkpoint.each_expert(0, "mlp_in")]), checkpoint.experts(0, "mlp_in"))
    with torch.inference_mode():
        assert torch.allclose(load_model(checkpoint)(IDS).logits, stock(IDS).logits, rtol=0, atol=1e-4)


def test_a_dense_mlp_that_is_no_number_of_experts_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", MIXTURE, moe_intermediate_size=192)
    with pytest.raises(CheckpointError, match="intermediate_size is 512, which is no multiple of the 192"):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def with_inputs(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("inputs") / "m", INPUTS_OF_EACH_LAYER))


def test_last_layers_have_queries_alone_and_wide_mlps(with_inputs: Checkpoint) -> None:
    a = with_inputs.architecture
    assert Architecture.from_json(a.to_json()) == a
    assert [block.mixer.source for block in a.blocks if isinstance(block.mixer, Attention)] == [None, None, 0, 1]
    assert [block.mlp.width for block in a.blocks if block.mlp is not None] == [512, 512, 1024, 1024]
    assert [len(with_inputs.projections(layer, "attn_in")) for layer in range(4)] == [3, 3, 1, 1]
    assert ["k_norm" in block.norms for block in a.blocks] == [True, True, False, False]
    assert {block.per_layer for block in a.blocks} == {32}


def test_keys_and_values_that_others_read_are_cached_once(with_inputs: Checkpoint) -> None:
    a = with_inputs.architecture
    own = 2 * (2 * 48 + 2 * 96)
    assert cache_bytes(a, 100, "f32") == own * 100 * 4
    cos, sin = (torch.zeros(100, len(a.inv_freq)) for _ in range(2))
    local = tuple(torch.zeros(100, len(a.local_inv_freq)) for _ in range(2))
    norms = [(torch.ones(1), torch.ones(1))] * 2 + [(torch.ones(1), None)] * 2
    cache = DenseKvCache(attention_shape(a, norms, cos, sin, more_tables=[(local[0], local[1])]), "f32", "cpu")
    stored = {of.data_ptr(): of.nbytes for of in (*cache._keys, *cache._values)}
    assert sum(stored.values()) == own * 100 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_sources": (0, 0)},
        {"kv_sources": (0, 2)},
        {"kv_sources": (0, True)},
        {"kv_sources": (), "shared_intermediate": 1024},
        {"per_layer": -1},
    ],
    ids=["another window", "one without keys", "no number", "wide without sources", "below 0"],
)
def test_sources_of_no_model_are_refused(with_inputs: Checkpoint, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kv_sources|another window|shared_intermediate|per_layer"):
        check_numbers(replace(with_inputs.architecture, **changes))


@pytest.mark.parametrize("whole", [False, True], ids=["text alone", "with images"])
def test_keys_and_values_that_nothing_reads_are_left_out(
    whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "m", INPUTS_OF_EACH_LAYER)
    text, tensors = open_checkpoint(folder), load_file(folder / "model.safetensors")
    unread = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(2, 2)
        for layer in (2, 3)
        for name in ("k_norm", "k_proj", "v_proj")
    }
    released = {**tensors, **unread}
    if whole:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": config}))
        released = {f"model.language_model.{name.removeprefix('model.')}": of for name, of in released.items()}
        released["model.vision_tower.patch_embedder.weight"] = torch.ones(2, 2)
    save_file(released, folder / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(folder).source.shapes == text.source.shapes
    said = capsys.readouterr().err
    told = "reads another's (model.layers.2.self_attn.k_norm.* and 5 prefixes more, 6 tensors) is left out"
    assert said.count("is left out") == said.count(told) == 1


def test_no_gguf_for_llama_cpp_is_written(with_inputs: Checkpoint) -> None:
    with pytest.raises(PackingError, match=r"keys and values of another: GGUFs for llama\.cpp of gemma4 models"):
        FORMATS["q4_k"].check_model(with_inputs)


@pytest.mark.parametrize("key", ["embedding_length_per_layer_input", "attention.shared_kv_layers"])
def test_a_gguf_of_such_a_model_is_refused(key: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "gemma4_text", **AS_LLAMA_CPP["gemma4_text"])
    file = read_gguf(pack(PackRequest(str(model), tmp_path / "m.gguf", format="bf16")).path)
    metadata = {name: value for name, value in file.metadata.items() if name != OWN_CONFIG}
    assert gguf_config(replace(file, metadata=metadata), "m").model_type == "gemma4_text"
    with pytest.raises(CheckpointError, match="m: a GGUF of a gemma4_text model with an input of each layer, or with"):
        gguf_config(replace(file, metadata=metadata | {f"gemma4.{key}": 1}), "m")


def test_types_without_keys_and_values_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", INPUTS_OF_EACH_LAYER)
    edit_config(folder, num_kv_shared_layers=3)
    with pytest.raises(
        CheckpointError, match="m: gemma4_text: num_kv_shared_layers is 3, and no layer before has keys and values"
    ):
        open_checkpoint(folder)


def test_tables_of_fewer_tokens_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", INPUTS_OF_EACH_LAYER, vocab_size_per_layer_input=VOCABULARY // 2)
    with pytest.raises(CheckpointError, match="vocab_size_per_layer_input is 256; expected the 512 of vocab_size"):
        _ = open_checkpoint(folder).architecture


@pytest.mark.parametrize("changes", [{}, {"num_kv_shared_layers": 0}])
def test_what_blocks_are_given_beside_hidden_states_travels_with_these(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", INPUTS_OF_EACH_LAYER, **changes))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    expected, last = by_the_stock_model(stock, stock.model.layers, IDS)
    stream = open_blocks(checkpoint)
    found, _ = by_a_stream(stream, checkpoint.layers, IDS, watched=False)
    hidden = [states[..., : checkpoint.config.hidden_size] for states in found]
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(hidden, expected, strict=True))
    assert torch.allclose(stream.finish(found[-1]), last, rtol=1e-4, atol=1e-4)
    part = by_a_stream(open_blocks(checkpoint), checkpoint.layers, IDS[1:], watched=False)[0]
    assert torch.allclose(part[-1], found[-1][1:], rtol=1e-4, atol=1e-4)
