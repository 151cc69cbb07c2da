"""A folder with only a `tokenizer.model`: SentencePiece's own tokens, id for id."""

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from models_for_tests import make_model
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from vocabularies import LINES, MARKED, NASTY, RANDOM, shared_lines

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.formats.open import read_packed
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint

SPECIAL = "<|endoftext|>", "<s>", "</s>", "<unk>"
TEXTS = [
    text
    for text in [*LINES[::10], *NASTY, *MARKED, *RANDOM, " " * 9 + "x" + " " * 5, "aaaaaaa aaaa", "\n\n a \n b"]
    if not any(special in text for special in SPECIAL)  # which SentencePiece does not look for in a text
]

# As the first Llama's, as llama2.c's small models', without a prefix.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True},
    "squeezed": {"remove_extra_whitespaces": True},
    "no prefix": {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
}


def trained(**options: Any) -> bytes:
    model = io.BytesIO()
    runs = ["a" * n for n in range(1, 30)] + [f"x{' ' * n}y" for n in range(1, 30)]
    asked = {"model_type": "bpe", "vocab_size": 900, "byte_fallback": True, "normalization_rule_name": "identity"}
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[::3] + runs * 20), model_writer=model, minloglevel=2, **asked | options
    )
    return model.getvalue()


def folder_with(model: bytes, folder: Path, **changes: Any) -> Path:
    make_model(folder, **{"vocab_size": 900, "bos_token_id": 1, "eos_token_id": 2, **changes})
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "tokenizer.model").write_bytes(model)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_sentencepieces_own(kind: str, tmp_path: Path) -> None:
    model = trained(**KINDS[kind])
    checkpoint = open_checkpoint(folder_with(model, tmp_path / "model"))
    own = SentencePieceProcessor(model_proto=model)
    made = checkpoint.tokenizer
    assert [made.encode(text, add_special_tokens=False) for text in TEXTS] == own.encode(TEXTS)
    assert (len(made), made.bos_token, made.eos_token, made.unk_token) == (900, "<s>", "</s>", "<unk>")
    assert made.encode("a b") == [1, *own.encode("a b")]
    assert made.decode(own.encode("Once upon a time ñ")) == "Once upon a time ñ"


def only_model(shared: Path, folder: Path) -> Path:
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.model")
    folder.mkdir()
    for name in names:
        shutil.copy(shared / "models/stories-260k" / name, folder)
    return folder


def test_a_trained_model_has_its_own_tokens(shared: Path, tmp_path: Path) -> None:
    folder = only_model(shared, tmp_path / "model")
    own = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    lines = shared_lines(shared) + TEXTS
    made = open_checkpoint(folder).tokenizer
    assert [made.encode(text, add_special_tokens=False) for text in lines] == own.encode(lines)


def test_such_a_model_is_packed_with_its_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(trained(**KINDS["llama"]), tmp_path / "model"))
    for name in ("zigzag-q4_k", "f16"):
        FORMATS[name].plan(checkpoint, PlanRequest()).write(tmp_path / f"{name}.gguf")
    assert read_packed(tmp_path / "zigzag-q4_k.gguf").tokenizer_json == checkpoint.tokenizer_json()
    again = open_checkpoint(tmp_path / "f16.gguf")
    assert again.tokenizer_json() == checkpoint.tokenizer_json()
    assert (again.tokenizer.bos_token, again.tokenizer.eos_token) == ("<s>", "</s>")


def test_squeezed_spaces_are_refused_where_llama_cpp_would_keep_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(trained(**KINDS["squeezed"]), tmp_path / "model"))
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    with pytest.raises(PackingError, match=r"llama\.cpp has no equivalent of the normalizer"):
        FORMATS["f16"].plan(checkpoint, PlanRequest())


def test_tokens_that_the_folder_adds_are_added(tmp_path: Path) -> None:
    folder = folder_with(trained(**KINDS["llama"]), tmp_path / "model", vocab_size=910)
    decoder = {"905": {"content": "<|end|>", "special": True}, "2": {"content": "<stop>", "special": True}}
    said = {"add_bos_token": False, "eos_token": {"content": "<|end|>"}, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": "{{ x }}"}))
    (folder / "added_tokens.json").write_text('{"<tool>": 900}')
    made = open_checkpoint(folder).tokenizer
    assert made.convert_tokens_to_ids(["<tool>", "<|end|>", "<stop>"]) == [900, 905, 2]
    assert (made.eos_token, made.chat_template) == ("<|end|>", "{{ x }}")
    assert made.encode("<tool>") == [900]
    assert made.decode([900, 905], skip_special_tokens=True) == "<tool>"
    small = folder_with((folder / "tokenizer.model").read_bytes(), tmp_path / "small", vocab_size=904)
    shutil.copy(folder / "tokenizer_config.json", small)
    assert open_checkpoint(small).tokenizer.convert_tokens_to_ids("<|end|>") == 905, "special, beyond the embedding"
    decoder["905"]["special"] = False
    (small / "tokenizer_config.json").write_text(json.dumps(said | {"eos_token": "</s>"}))
    with pytest.raises(CheckpointError, match="has 906 tokens, the model 904"):
        _ = open_checkpoint(small).tokenizer


def refused(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        _ = checkpoint.tokenizer
    assert "\n" not in str(caught.value)
    assert "save the tokenizer as tokenizer.json" in str(caught.value)
    return str(caught.value)


def test_what_is_no_such_model_is_one_line(tmp_path: Path) -> None:
    model = trained(**KINDS["llama"])
    folder = folder_with(model, tmp_path / "model")
    tiktoken = b"".join(base64.b64encode(bytes([n, n])) + f" {n}\n".encode() for n in range(256))
    for damaged in (tiktoken, model[:-100], b"", b"\x00" * 50):
        (folder / "tokenizer.model").write_bytes(damaged)
        assert "tokenizer.model: not a SentencePiece model, or damaged" in refused(open_checkpoint(folder))
    (folder / "tokenizer.model").write_bytes(trained(model_type="unigram"))
    assert "that is not BPE" in refused(open_checkpoint(folder))
    (folder / "tokenizer.model").write_bytes(trained(normalization_rule_name="nfkc"))
    assert "normalises text by nfkc, which is not read" in refused(open_checkpoint(folder))
    (folder / "tokenizer.model").write_bytes(model)
    for added in ('{"<a>": 99999999}', '{"<a>": "x"}', '{"<a>": -3}', '{"<a>": null}'):
        (folder / "added_tokens.json").write_text(added)
        refused(open_checkpoint(folder))
