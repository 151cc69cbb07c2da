"""Where models keep their chat templates, which tokens these name, what ends a turn, and the form of content."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparsepack.errors import UserError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.loading import load
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.writer import texts_of
from sparsepack.models.tokenizer.chat import render_chat, turn_ends
from tests.models.tokenizer.test_auto_tokenizer import CHATML, FAST, Kind, gpt_2, model_of
from tests.models_for_tests import make_model

LISTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "text": text} for text in texts]}]


def test_content_comes_in_the_form_that_the_template_takes() -> None:
    said = [{"role": "user", "content": "Hello"}]
    assert render_chat(LISTS, said) == render_chat(LISTS, parts("Hel", "lo")) == "user: Hello"
    for template in ("{{ messages[0].content }}", "{{ messages[0].content | trim }}", "{{ '' + messages[0].content }}"):
        assert render_chat(template, parts("Hel", "lo")) == "Hello"
    assert render_chat("{{ messages[0].content | tojson }}", parts("Hello")) == '"Hello"'
    assert (render_chat(BOTH, said), render_chat(BOTH, parts("Hel", "lo"))) == ("Hello", "<Hel><lo>")
    assert render_chat(CHATML, parts("Hello", kind="input_text")) == render_chat(CHATML, said)
    spoken = [
        {"role": "system", "content": "Be brief."},
        *said,
        {"role": "assistant", "content": parts("Hi")[0]["content"]},
    ]
    assert render_chat(LISTS, spoken) == "system: Be brief.user: Helloassistant: Hi"
    assert "None" not in render_chat("{{ messages[0].content or '' }}", [{"role": "assistant", "content": None}])


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}, {"type": "text", "text": 7}, "text", {}],
)
def test_a_part_that_is_no_text_is_refused_in_one_line(part: Any) -> None:
    with pytest.raises(UserError, match=r"message 0: a part of type .*; expected text, as .*images") as refused:
        render_chat(CHATML, [{"role": "user", "content": [part]}])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }} <own-end>{% endfor %}", "<own-end>"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_what_a_template_writes_behind_an_answer_ends_a_turn(template: str | None, end: str | None) -> None:
    added = ["<|im_start|>", "<own-end>", "</s>", "<own"] + (["<|im_end|>"] if end == "<|im_end|>" else [])
    ends = turn_ends(template, {"eos_token": "</s>"}, added)
    assert ends[:1] == ([] if end is None else [end])


def test_thousands_of_added_tokens_and_of_spaces_behind_an_answer_take_no_time() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '%8000000s' % '' }}<q7>"
    assert turn_ends(template, {}, [f"<q{number}>" for number in range(20_000)]) == ["<q7>"]


def test_known_ends_of_turns_count_where_they_are_added_tokens() -> None:
    assert turn_ends(None, {}, ["<|eot_id|>", "<end_of_turn>", "<s>"]) == ["<|eot_id|>", "<end_of_turn>"]


def chat_model(folder: Path, **changes: Any) -> Checkpoint:
    settings = {
        "tokenizer_class": FAST,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<s>",
    }
    kind = Kind(gpt_2, settings, ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eom|>"))
    checkpoint = model_of(kind, folder, **changes)
    (folder / "chat_template.jinja").write_text(CHATML + "{{ pad_token }}{{ unk_token }}{{ eos_token }}{{ sep_token }}")
    return checkpoint


def test_every_token_that_ends_a_turn_ends_one(tmp_path: Path) -> None:
    checkpoint = chat_model(tmp_path / "model", eos_token_id=3)
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    ids = checkpoint.tokenizer.convert_tokens_to_ids
    expected = [3, 5, ids("</s>"), ids("<|im_end|>"), ids("<|eom|>")]
    assert list(checkpoint.architecture.eos) == expected
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    assert list(load(tmp_path / "z.gguf", threads=1).packed.architecture.eos) == expected
    FORMATS["f16"].plan(checkpoint, PlanRequest()).write(tmp_path / "f16.gguf")
    keys = read_gguf(tmp_path / "f16.gguf").metadata
    named = [keys[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot")]
    assert named == [ids("</s>"), ids("<|im_end|>")]
    assert set(expected) - {3, 5} <= set(open_checkpoint(tmp_path / "f16.gguf").architecture.eos)


def test_a_template_has_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    checkpoint = chat_model(tmp_path / "model", eos_token_id=[0, 3])
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    hello = [{"role": "user", "content": "Hello"}]
    assert load(tmp_path / "z.gguf", threads=1).chat_prompt(hello).endswith("assistant\n<pad><s></s>")


def test_templates_are_taken_as_by_autotokenizer_then_as_by_autoprocessor(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    def found() -> dict[str, str]:
        return open_checkpoint(folder).chat_templates

    (folder / "processor_config.json").write_text('{"chat_template": "processor"}')
    assert found() == {"default": "processor"}
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert found() == {"default": "json"}
    assert texts_of(open_checkpoint(folder))["chat_template.jinja"] == "json", "where AutoTokenizer looks"
    settings = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "settings"}, {"name": "rag", "template": "r"}]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": named}))
    assert found() == {"default": "settings", "rag": "r"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools {{ tools[0].function.name }}")
    (folder / "chat_template.jinja").write_text("file")
    assert found() == {"default": "file", "tool_use": "tools {{ tools[0].function.name }}"}
    texts = texts_of(open_checkpoint(folder))
    assert "chat_template.jinja" not in texts
    assert {each["name"] for each in json.loads(texts["tokenizer_config.json"])["chat_template"]} == {
        "default",
        "tool_use",
    }


def test_the_template_for_tools_is_carried_and_taken_where_there_are_tools(tmp_path: Path) -> None:
    checkpoint = chat_model(tmp_path / "model")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/tool_use.jinja").write_text("tools {{ tools[0].function.name }}")
    FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest()).write(tmp_path / "z.gguf")
    model, hello = load(tmp_path / "z.gguf", threads=1), [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert model.chat_prompt(hello, tools) == "tools f"
    assert model.chat_prompt(hello).startswith("<|im_start|>user")


def test_further_variables_reach_the_template_but_not_in_place_of_its_own() -> None:
    variables = {"enable_thinking": False, "tools": "x", "bos_token": "y"}
    hello = [{"role": "user", "content": "Hello"}]
    template = "{{ enable_thinking }} {{ tools }} {{ bos_token }}"
    assert render_chat(template, hello, variables=variables, bos_token="<s>") == "False None <s>"


def test_the_end_of_a_channel_ends_no_turn() -> None:
    assert turn_ends(None, {}, ["<|end|>", "<|user|>"]) == ["<|end|>"]
    assert turn_ends(None, {}, ["<|end|>", "<|channel|>"]) == []
