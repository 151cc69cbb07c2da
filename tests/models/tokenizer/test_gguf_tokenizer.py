"""The tokenizer of a GGUF, built from its keys alone: the checkpoint's own, and llama.cpp's, id for id."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_for_tests import make_model
from pairwise import each_value
from tokenizers import Tokenizer, processors
from vocabularies import (
    EOS,
    LARGE,
    LINES,
    LLAMA3,
    MARKED,
    NASTY,
    PRE_TOKENIZERS,
    RANDOM,
    as_json,
    byte_level_tokenizer,
    differing,
    encoder,
    load,
    orphan,
    prepending,
    sentencepiece,
    shared_lines,
    split,
    trained,
)

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile, TensorInfo
from sparsepack.formats.containers.gguf_writer import GgufPlan
from sparsepack.formats.llama_cpp.vocabulary import INEXACT, vocabulary
from sparsepack.formats.open import open_artifact
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.tokenizer import tokenizer_json as pretokenizers
from sparsepack.models.tokenizer.gguf_tokenizer import OWN_TOKENIZER, gguf_tokenizer_json
from sparsepack.models.tokenizer.tokenizer import gguf_tokenizer
from sparsepack.models.tokenizer.tokenizer_json import UNUSED

TEXTS = LINES[::40] + NASTY + MARKED + RANDOM[::3]
KEY = "tokenizer.ggml."


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if name in LARGE else []


def file_of(keys: dict[str, Any], rows: int | None = None) -> GgufFile:
    """The header of a GGUF with these keys and an embedding of so many rows."""
    shape = (rows or len(keys[f"{KEY}tokens"]), 64)
    tensors = {"token_embd.weight": TensorInfo("token_embd.weight", shape, "F16", 0, 0)}
    return GgufFile(Path("m.gguf"), keys, tensors, 0, np.zeros(0, np.uint8))


def rebuilt(keys: dict[str, Any], rows: int | None = None) -> Tokenizer:
    return Tokenizer.from_str(gguf_tokenizer_json(file_of(keys, rows), "m.gguf"))


def tokens(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in texts for special in (False, True)]


def small_keys(name: str = "llama-bpe", size: int = 400, **changes: Any) -> dict[str, Any]:
    tokenizer = trained(*PRE_TOKENIZERS[name], size=size)
    keys = vocabulary(as_json(tokenizer), EOS, {"vocab_size": tokenizer.get_vocab_size()})
    return keys | {KEY + key: value for key, value in changes.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in PRE_TOKENIZERS])
def test_byte_level_tokens_are_the_checkpoints_own_and_llama_cpps(name: str, tmp_path: Path) -> None:
    own = byte_level_tokenizer(name)
    keys = vocabulary(as_json(own), EOS, {"vocab_size": own.get_vocab_size() + 3})
    made = rebuilt(keys)
    assert tokens(made, TEXTS) == tokens(own, TEXTS)
    assert made.get_vocab() == own.get_vocab()
    assert [made.decode(ids) for ids in tokens(made, NASTY)] == [own.decode(ids) for ids in tokens(own, NASTY)]
    assert vocabulary(as_json(made), EOS, {"vocab_size": own.get_vocab_size() + 3}) == keys
    pytest.importorskip("llama_cpp")
    exact = LINES[::40] + NASTY if name in INEXACT else TEXTS
    assert differing(load(keys, tmp_path / "v.gguf"), encoder(made), exact) == []


ALIASES = [
    pytest.param(first, other, marks=marks_of(first))
    for first, rule in pretokenizers.PRE_TOKENIZERS.items()
    for other in rule.same
]


@pytest.mark.parametrize(("first", "other"), ALIASES)
def test_other_names_mean_the_same_to_llama_cpp(first: str, other: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    own = orphan(as_json(trained(PRE_TOKENIZERS[first][0], size=1500)), "Ġzqzqz")  # tells whether merges are ignored
    own["model"]["ignore_merges"] = PRE_TOKENIZERS[first][1]
    keys = vocabulary(own, EOS, {"vocab_size": 1502}) | {f"{KEY}pre": other}
    made = rebuilt(keys)
    texts = [*LINES[::200], *NASTY, "a zqzqz b"]
    assert differing(load(keys, tmp_path / "v.gguf"), encoder(made), texts) == []


@each_value({"merges": ["trained", "splits"], "spaces": ["prepend", "always", "never", "split"]})
def test_sentencepiece_tokens_are_llama_cpps(merges: str, spaces: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    own = sentencepiece(merges, spaces)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    keys = vocabulary(own, config, {"vocab_size": len(own["model"]["vocab"])})
    texts = [*TEXTS, "a<s>b c</s> d", "<unk>", "</s", "▁▁▁ ▁a"]
    made = rebuilt(keys)
    assert differing(load(keys, tmp_path / "v.gguf"), encoder(made), texts) == []
    if spaces == "prepend":
        assert tokens(made, texts) == tokens(Tokenizer.from_str(json.dumps(own)), texts)
        assert made.decode(made.encode("Once upon  a time ñ").ids) == "Once upon  a time ñ"


@pytest.mark.parametrize(
    "model", ["books-26m-silu", pytest.param("books-26m-relu", marks=pytest.mark.long), "stories-260k"]
)
def test_trained_models_have_their_own_tokens(model: str, shared: Path) -> None:
    from transformers import AutoTokenizer

    folder = shared / "models" / model
    parts = [json.loads((folder / f"{n}.json").read_text()) for n in ("tokenizer", "tokenizer_config", "config")]
    own, lines = AutoTokenizer.from_pretrained(folder), shared_lines(shared)
    texts = [text for text in lines + NASTY + MARKED if not text.startswith((" ", "▁")) or model != "stories-260k"]
    made = gguf_tokenizer(file_of(vocabulary(*parts)), "m.gguf")
    assert [made.encode(text) for text in texts] == [own.encode(text) for text in texts]
    assert (made.bos_token, made.eos_token, len(made)) == (own.bos_token, own.eos_token, len(own))
    if model == "stories-260k":  # Metaspace puts no space before one; llama.cpp, whose keys these are, does
        twin = Tokenizer.from_str(json.dumps(prepending(parts[0])))
        assert tokens(made.backend_tokenizer, lines + NASTY) == tokens(twin, lines + NASTY)


def model_with(own: Tokenizer, folder: Path, **changes: Any) -> Checkpoint:
    """A random model with this tokenizer."""
    make_model(folder, **{"vocab_size": own.get_vocab_size(), **changes})
    own.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return open_checkpoint(folder)


def llama_3() -> Tokenizer:
    """Byte-level BPE like Llama 3's: without <|endoftext|>, each text begins with <|begin_of_text|>."""
    parsed = as_json(trained(split(LLAMA3), True, size=420))
    names = {"<|endoftext|>": "<|begin_of_text|>", "<|im_start|>": "<|end_of_text|>"}
    vocab = parsed["model"]["vocab"]
    parsed["model"]["vocab"] = {names.get(token, token): id for token, id in vocab.items()}
    for added in parsed["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer


def foreign(checkpoint: Checkpoint, path: Path, **changes: Any) -> Path:
    """The model as llama.cpp's converter writes it: without our copies, and with changed keys of the tokenizer."""
    plan = FORMATS["f16"].plan(checkpoint, PlanRequest())
    assert isinstance(plan, GgufPlan)
    kept = {key: value for key, value in plan.values.items() if key not in ("sparsepack.config", OWN_TOKENIZER)}
    for key, value in changes.items():
        kept[KEY + key] = (value, *kept[KEY + key][1:])
        if value is None:
            del kept[KEY + key]
    dataclasses.replace(plan, values=kept).write(path)
    return path


@pytest.mark.parametrize("rows", [0, 5])
def test_a_vocabulary_without_endoftext_gets_no_token_that_it_lacks(rows: int, tmp_path: Path) -> None:
    own = llama_3()
    size = own.get_vocab_size()
    checkpoint = model_with(own, tmp_path / "model", vocab_size=size + rows)
    found = open_checkpoint(foreign(checkpoint, tmp_path / "m.gguf"))
    assert len(found.tokenizer) == size
    assert "<|endoftext|>" not in found.tokenizer.get_vocab()
    assert found.architecture.bos == 0
    assert [found.tokenizer.encode(t) for t in TEXTS] == [checkpoint.tokenizer.encode(t) for t in TEXTS]
    assert tokens(Tokenizer.from_str(found.tokenizer_json()), TEXTS) == tokens(own, TEXTS)


def test_fewer_tokens_than_rows_are_accepted_and_more_are_refused(tmp_path: Path) -> None:
    checkpoint = model_with(llama_3(), tmp_path / "model", vocab_size=430)
    listed = vocabulary(as_json(llama_3()), {"eos_token": "<|end_of_text|>"}, {"vocab_size": 421})
    fewer = {key: listed[KEY + key] for key in ("tokens", "token_type")}
    found = open_checkpoint(foreign(checkpoint, tmp_path / "fewer.gguf", **fewer))
    assert len(found.tokenizer) == 421
    more = {
        key: [*fewer[key], *extra] for key, extra in (("tokens", map(str, range(500, 510))), ("token_type", [1] * 10))
    }
    with pytest.raises(CheckpointError, match="the tokenizer has 431 tokens, the model 430; they do not belong"):
        _ = open_checkpoint(foreign(checkpoint, tmp_path / "more.gguf", **more)).tokenizer


def test_a_file_that_names_no_bos_has_none(tmp_path: Path) -> None:
    checkpoint = model_with(llama_3(), tmp_path / "model")
    found = open_checkpoint(foreign(checkpoint, tmp_path / "m.gguf", bos_token_id=None, add_bos_token=None))
    assert found.tokenizer.bos_token_id is None
    assert found.architecture.bos is None
    assert found.tokenizer.encode("a b") == llama_3().encode("a b", add_special_tokens=False).ids


@pytest.mark.parametrize("listed", [True, False])
def test_a_vocabulary_of_bytes_alone_needs_no_merges(listed: bool) -> None:
    own = trained(split(LLAMA3), True, size=258)
    keys = vocabulary(as_json(own), EOS, {"vocab_size": own.get_vocab_size()})
    assert keys[f"{KEY}merges"] == []
    if not listed:  # gguf-py writes no empty list
        del keys[f"{KEY}merges"]
    assert tokens(rebuilt(keys), TEXTS) == tokens(own, TEXTS)


def test_our_own_files_carry_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    parsed = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(parsed | {"normalizer": {"type": "NFC"}}))  # which no key says
    checkpoint = open_checkpoint(folder)
    for name in ("f16", "q4_k"):
        FORMATS[name].plan(checkpoint, PlanRequest()).write(tmp_path / f"{name}.gguf")
    assert open_checkpoint(tmp_path / "f16.gguf").tokenizer_json() == checkpoint.tokenizer_json()
    packed = open_artifact(tmp_path / "q4_k.gguf").stock().tokenizer
    assert packed.encode("e\u0301") == checkpoint.tokenizer.encode("é")
    assert (packed.bos_token, packed.eos_token) == (checkpoint.tokenizer.bos_token, checkpoint.tokenizer.eos_token)


def test_unused_tokens_that_merges_or_keys_need_stay() -> None:
    keys = small_keys()
    listed = list(keys[f"{KEY}tokens"])
    left, right = keys[f"{KEY}merges"][0].split(" ")
    kinds = list(keys[f"{KEY}token_type"])
    kinds[listed.index(left + right)] = UNUSED
    keys |= {f"{KEY}tokens": [*listed, "[PAD]"], f"{KEY}token_type": [*kinds, UNUSED]}
    keys[f"{KEY}padding_token_id"] = len(listed)
    made = gguf_tokenizer(file_of(keys), "m.gguf")
    assert made.pad_token_id == len(listed) == len(made) - 1
    assert tokens(made.backend_tokenizer, TEXTS[:99]) == tokens(rebuilt(small_keys()), TEXTS[:99])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other pre-tokenizer": ({"pre": "viking"}, "tokenizer.ggml.pre 'viking' is none of gpt-2, smollm, llama-bpe"),
    "no pre-tokenizer": ({"pre": None}, "tokenizer.ggml.pre 'None' is none of"),
    "other model": ({"model": "t5"}, "tokenizer.ggml.model 't5' is neither gpt2 nor llama"),
    "no model": ({"model": None}, "tokenizer.ggml.model is missing"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens of numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens holds '1'"),
    "a token twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "the token 'a' stands twice"),
    "too few kinds": ({"token_type": [1, 1]}, "401 tokens, but 2 in tokenizer.ggml.token_type"),
    "no merges": ({"merges": None}, "no tokenizer.ggml.merges, without which nothing makes the token"),
    "strange merges": ({"merges": ["a"]}, "the merge 'a' is not of two tokens into a third"),
    "unknown merges": ({"merges": ["a zzz"]}, "the merge 'a zzz' is not of two tokens into a third"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    "a token of a whole book": (
        {"model": "llama", "tokens": ["a", "x" * 30_000], "token_type": [1, 1], "scores": [0.0, 0.0]},
        "its longest token has 30,000 characters; expected some hundreds at most",
    ),
    "an id too large": ({"bos_token_id": 4000}, "tokenizer.ggml.bos_token_id is 4000, there are 401 tokens"),
    "an id of text": ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id is x, there are 401 tokens"),
    "a flag of text": ({"add_bos_token": "x"}, "tokenizer.ggml.add_bos_token is 'x', neither true nor false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_in_one_line(case: str) -> None:
    changes, said = REFUSED[case]
    keys = {key: value for key, value in small_keys(**changes).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        gguf_tokenizer_json(file_of(keys, rows=500), "m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("expected the model's Hugging Face folder here")
    assert "\n" not in str(caught.value)
