"""Chat templates: from every place where models keep them, and run so that they can do no harm."""

import json
from pathlib import Path

import pytest

from sparsepack.errors import PackingError, UserError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.writer import chat_template
from sparsepack.models.tokenizer.chat import render_chat, template_of
from tests.models_for_tests import make_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello "}]


def test_a_conversation_becomes_the_text_that_the_template_makes() -> None:
    assert render_chat(CHATML, HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat("{{ bos_token }}{{ eos_token }}", HELLO, bos_token="<s>", eos_token="</s>") == "<s></s>"
    assert render_chat("{{ bos_token }}x", HELLO) == "x"
    answered = [*HELLO, {"role": "assistant", "content": "I am"}]
    unfinished = render_chat(CHATML, answered, add_generation_prompt=False, continue_final_message=True)
    assert unfinished.endswith("<|im_start|>assistant\nI am")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_or_does_wrong_is_one_line(template: str) -> None:
    with pytest.raises(UserError, match="chat template cannot take this conversation") as caught:
        render_chat(template, HELLO)
    assert "\n" not in str(caught.value)


def test_content_of_none_beside_calls_of_tools_is_an_empty_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    empty = render_chat(CHATML, [*HELLO, {**call, "content": ""}])
    assert render_chat(CHATML, [*HELLO, call]) == empty
    assert "None" not in empty


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="no chat template"):
        render_chat(None, HELLO)
    with pytest.raises(UserError, match="without messages"):
        render_chat(CHATML, [])
    with pytest.raises(UserError, match="message 1: expected a role"):
        render_chat(CHATML, [*HELLO, {"content": "x"}])
    with pytest.raises(UserError, match="message 0: it has no content"):
        render_chat(CHATML, [{"role": "user"}])
    with pytest.raises(UserError, match="at most 1,048,576"):
        render_chat("x" * (2**20 + 1), HELLO)


def test_the_default_of_several_templates_is_taken() -> None:
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert template_of({"chat_template": several}) == "d"
    assert template_of({"chat_template": {"default": "d"}}) == "d"
    wrong = (None, "", 7, [7], {"rag": "r"}, [{"name": [], "template": "x"}])
    assert [template_of({"chat_template": found}) for found in wrong] == [None] * len(wrong)
    assert template_of({}) is None


def test_a_folder_has_it_in_its_own_file_or_among_the_tokenizers_settings(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    assert chat_template(open_checkpoint(folder)) is None
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "of the settings"}))
    assert chat_template(open_checkpoint(folder)) == "of the settings"
    (folder / "chat_template.jinja").write_text("of the file")
    assert chat_template(open_checkpoint(folder)) == "of the file"


def test_a_template_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(PackingError, match="its chat template is no text"):
        chat_template(open_checkpoint(folder))
    (folder / "chat_template.jinja").unlink()
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "half \ud800"}))
    with pytest.raises(PackingError, match="its chat template is no text"):
        chat_template(open_checkpoint(folder))
