"""The ids of prompts, windows and chats are those of transformers' AutoTokenizer, for the classes of tokenizers that
models have, and what an artifact carries makes the same."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pairwise import each_value
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from sparsepack.errors import CheckpointError, TextError, UserError
from sparsepack.files.text import Text
from sparsepack.formats.open import read_packed
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.stock import stock_tokenizer
from sparsepack.formats.table import FORMATS
from sparsepack.loading import load
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.tokenizer.chat import render_chat
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.runtime.generation.generate import open_tokenizer, prompt_tokens
from tests.models_for_tests import TEXT, make_model
from tests.vocabularies import LLAMA3, QWEN2, TEKKEN

ROWS = 640
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}|{{ pad_token }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "?"},
]
TEXTS = ["The quick brown fox.", "", "   leading", " a", "naïve → 日本 🙂 e\u0301", "a\n\n  b\t1234567", "x" * 300]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def _bytes_model() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT[:200_000]], trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return json.loads(made.to_str())["model"]


@cache
def _pieces_model() -> Any:
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    made.train_from_iterator([TEXT[:200_000]], trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    return json.loads(made.to_str())["model"]


def bytes_level(pre: Any, ignore_merges: bool = False) -> Tokenizer:
    model = _bytes_model()
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(model["vocab"], merges, ignore_merges=ignore_merges))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    return made


def pieces(normalizer: Any, pre: Any = None) -> Tokenizer:
    model = _pieces_model()
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama_2() -> Tokenizer:
    return pieces(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def qwen_2() -> Tokenizer:
    made = bytes_level(split(QWEN2))
    made.normalizer, made.post_processor = normalizers.NFC(), processors.ByteLevel(trim_offsets=False)
    return made


def gpt_2() -> Tokenizer:
    made = bytes_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def smollm() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return bytes_level(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


@dataclass(frozen=True)
class Kind:
    """A tokenizer as models have it.

    settings -- its tokenizer_config.json; special -- tokens added to tokenizer.json; bos -- put before a text by it
    others   -- tokens of added_tokens.json, from the first free id on
    """

    make: Callable[[], Tokenizer]
    settings: dict[str, Any]
    special: tuple[str, ...] = ()
    bos: str | None = None
    family: str = "llama"
    others: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


FAST, IM = "PreTrainedTokenizerFast", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS = {
    "Llama 2": Kind(llama_2, {**SPM, "add_bos_token": True, "legacy": False}, bos="<s>"),
    "Llama 3": Kind(
        lambda: bytes_level(split(LLAMA3), ignore_merges=True),
        {"tokenizer_class": FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": NAMED},
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "Qwen 2": Kind(
        qwen_2,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
        },
        IM,
        family="qwen2",
    ),
    "Qwen 3": Kind(
        qwen_2,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "add_bos_token": False,
            "chat_template": CHATML,
        },
        (*IM, "<think>"),
        family="qwen3",
    ),
    "Gemma": Kind(
        lambda: pieces(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
        {**SPM, "tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>", "chat_template": NAMED},
        ("<pad>", "<start_of_turn>", "<end_of_turn>"),
        bos="<s>",
    ),
    "Phi 3": Kind(llama_2, {**SPM, "add_bos_token": False}, ("<|end|>", "<|user|>"), family="phi3"),
    "Phi 4": Kind(
        gpt_2,
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": IM[0], "eos_token": IM[2], "pad_token": IM[0]},
        IM,
        family="phi3",
    ),
    "SmolLM2": Kind(
        smollm,
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": IM[1], "eos_token": IM[2], "chat_template": CHATML},
        IM,
    ),
    "Mistral": Kind(llama_2, {**SPM, "add_bos_token": True, "chat_template": NAMED}, ("[INST]",), "<s>", "mistral"),
    "Mistral Nemo": Kind(
        lambda: bytes_level(split(TEKKEN), ignore_merges=True),
        {"tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>"},
        ("<s>", "</s>", "[INST]"),
        "<s>",
        "mistral",
    ),
    "OLMo": Kind(
        gpt_2,
        {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": IM[0], "eos_token": IM[0], "pad_token": "<|padding|>"},
        (IM[0], "<|padding|>"),
    ),
    "Mixtral, added_tokens.json": Kind(llama_2, {**SPM, "add_bos_token": True}, bos="<s>", others=("<tool>",)),
    "OPT": Kind(
        gpt_2,
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True},
        ("</s>", "<pad>"),
        "</s>",
    ),
    "DeepSeek": Kind(
        lambda: bytes_level(split(LLAMA3)),
        {**SPM, "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<b>", "eos_token": "<e>", "add_bos_token": True},
        ("<b>", "<e>", "<unk>"),
        "<b>",
    ),
    "settings that add tokens": Kind(
        gpt_2,
        {
            "tokenizer_class": FAST,
            "eos_token": "<|endoftext|>",
            "additional_special_tokens": ["<|tool|>"],
            "added_tokens_decoder": {
                "600": {"content": "<|endoftext|>", "special": True},
                "601": {"content": "<|tool|>", "special": True},
            },
        },
    ),
}


def write_tokenizer(kind: Kind, folder: Path, cut: bool = False) -> None:
    """The files of a kind's tokenizer; cut: saved after training on texts of one length."""
    made = kind.make()
    made.add_special_tokens(list(kind.special))
    if kind.bos is not None:
        pair = f"{kind.bos} $A {kind.bos}:1 $B:1"
        named = [(kind.bos, made.token_to_id(kind.bos))]
        made.post_processor = processors.TemplateProcessing(single=f"{kind.bos} $A", pair=pair, special_tokens=named)
    if cut:
        made.enable_truncation(5)
        made.enable_padding(length=9, pad_token=made.id_to_token(0))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(kind.settings))
    if kind.others:
        first = made.get_vocab_size()
        (folder / "added_tokens.json").write_text(json.dumps({t: first + n for n, t in enumerate(kind.others)}))


def model_of(kind: Kind, folder: Path, cut: bool = False, **changes: Any) -> Checkpoint:
    make_model(folder, kind.family, **{"vocab_size": ROWS, "num_hidden_layers": 1, **kind.changes, **changes})
    for path in folder.glob("*token*"):
        path.unlink()
    write_tokenizer(kind, folder, cut)
    return open_checkpoint(folder)


@each_value({"cut": [False, True], "name": KINDS})
def test_prompts_and_chats_are_tokenised_as_by_transformers(name: str, cut: bool, tmp_path: Path) -> None:
    kind = KINDS[name]
    checkpoint = model_of(kind, tmp_path / "model", cut)
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint.path), open_tokenizer(checkpoint.tokenizer_json())
    spelled = [token for token in (*kind.special, *kind.others) if token != kind.bos]
    for text in [*TEXTS, f"a {' b '.join(spelled)} c", "".join(spelled) + "x"]:
        expected = theirs(text)["input_ids"]
        if expected:
            assert prompt_tokens(ours, text, checkpoint.architecture.bos, ROWS) == expected, text
        else:
            with pytest.raises(UserError, match="empty prompt"):
                prompt_tokens(ours, text, checkpoint.architecture.bos, ROWS)
    if kind.bos is not None:
        once = prompt_tokens(ours, f"{kind.bos}a")
        assert once == theirs(f"{kind.bos}a", add_special_tokens=False)["input_ids"], "never twice"
    if template := checkpoint.chat_templates.get("default"):
        text = render_chat(template, CHAT, **checkpoint.special_tokens)
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert prompt_tokens(ours, text, checkpoint.architecture.bos, from_template=True) == expected
    inputs, _ = rolling_windows(checkpoint.tokenizer, Text("t", ("word " * 40,), "0", count=1), 8, 1)
    named = [] if theirs.bos_token_id is None else [theirs.bos_token_id]  # windows have it, whatever prompts have
    assert (
        inputs[0].tolist() == [*named, *theirs("word " * 40, add_special_tokens=False)["input_ids"]][: len(inputs[0])]
    )


@pytest.mark.parametrize(
    "name", [pytest.param("Llama 3", marks=pytest.mark.long), "Qwen 3", "Mixtral, added_tokens.json"]
)
def test_artifacts_carry_what_makes_the_same_tokens(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    checkpoint = model_of(kind, tmp_path / "model", cut=True)
    theirs = AutoTokenizer.from_pretrained(checkpoint.path)
    text = f"Twelve drummers drumming. {' '.join((*kind.special, *kind.others))}"
    expected = theirs(text)["input_ids"]
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    model = load(tmp_path / "z.gguf", threads=1)
    assert prompt_tokens(model.tokenizer, text, model.packed.architecture.bos) == expected
    stock = stock_tokenizer(read_packed(tmp_path / "z.gguf"))
    assert stock(text)["input_ids"] == expected
    assert stock.special_tokens_map == theirs.special_tokens_map
    if theirs.chat_template:
        assert model.chat_prompt(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


def test_a_special_token_beyond_the_embedding_is_taken_and_a_text_that_spells_it_refused(tmp_path: Path) -> None:
    rows = gpt_2().get_vocab_size() + 1
    kind = Kind(gpt_2, {"tokenizer_class": FAST, "eos_token": "<e>"}, ("<e>", "<image_soft_token>"))
    checkpoint = model_of(kind, tmp_path / "model", vocab_size=rows)
    assert checkpoint.tokenizer.convert_tokens_to_ids("<image_soft_token>") == rows
    line = f"'<image_soft_token>', token {rows}; expected tokens below {rows}"
    text = Text("t.txt", ("a <image_soft_token> b " * 9,), "0", count=1)
    with pytest.raises(TextError, match=rf"t\.txt: it spells {line}"):
        rolling_windows(checkpoint.tokenizer, text, 4, vocabulary=rows)
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    model = load(tmp_path / "z.gguf", threads=1)
    with pytest.raises(UserError, match=f"prompt: it spells {line}"):
        model.generate("a <image_soft_token>")
    FORMATS["f16"].plan(checkpoint, PlanRequest()).write(tmp_path / "f16.gguf")
    again = open_checkpoint(tmp_path / "f16.gguf")
    assert len(again.gguf.metadata["tokenizer.ggml.tokens"]) == rows


def test_ordinary_tokens_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    kind = Kind(gpt_2, {"tokenizer_class": FAST, "eos_token": "<e>"}, ("<e>",), others=("<more>",))
    rows = gpt_2().get_vocab_size() + 1
    with pytest.raises(CheckpointError, match=f"the tokenizer has {rows + 1} tokens, the model {rows}"):
        _ = model_of(kind, tmp_path / "model", vocab_size=rows).tokenizer
