"""Text to tokens and back over HTTP."""

from typing import Any

from serving import MESSAGES, Served

TEXT = "There was a king"


def post(served: Served, path: str, **body: Any) -> Any:
    answer = served.http().post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_is_tokenised_in_llama_cpp_s_and_in_vllm_s_form(served: Served) -> None:
    ids = served.model.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert post(served, "/tokenize", content=TEXT)["tokens"] == ids
    assert post(served, "/tokenize", content=TEXT, add_special=True)["tokens"] == [0, *ids]
    assert post(served, "/tokenize", prompt=TEXT) == {
        "tokens": [0, *ids],
        "count": len(ids) + 1,
        "max_model_len": 1024,
    }
    assert post(served, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"] == ids
    assert post(served, "/tokenize", content="")["tokens"] == []
    assert post(served, "/tokenize", content="messages")["count"] > 0


def test_pieces_are_the_text_of_each_token(served: Served) -> None:
    tokens = post(served, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert "".join(token["piece"] for token in tokens) == TEXT
    assert "".join(post(served, "/tokenize", content=TEXT, return_token_strs=True)["token_strs"]) == TEXT


def test_a_conversation_is_tokenised_as_its_chat_would_be(served: Served) -> None:
    tokens = post(served, "/tokenize", messages=MESSAGES)["tokens"]
    prompt = post(served, "/apply-template", messages=MESSAGES)["prompt"]
    assert prompt == "<user> Who was there?\n<assistant>"
    assert tokens == served.model.tokenizer.encode(prompt, add_special_tokens=False).ids


def test_tokens_are_text_again(served: Served) -> None:
    ids = post(served, "/tokenize", content=TEXT)["tokens"]
    assert post(served, "/detokenize", tokens=ids) == {"content": TEXT, "prompt": TEXT}
    assert post(served, "/detokenize", tokens=[]) == {"content": "", "prompt": ""}
    answer = served.http().post("/detokenize", json={"tokens": [99999]})
    assert "the model has 0 to 767" in answer.json()["error"]["message"]


def test_what_is_no_request_is_refused(served: Served) -> None:
    for path, body in (("/tokenize", {}), ("/tokenize", {"content": 5}), ("/detokenize", {"tokens": "a"})):
        assert served.http().post(path, json=body).status_code == 400
    assert served.http().post("/v1/embeddings", json={"input": "a"}).status_code == 501


def test_a_client_that_tokenises_by_the_server_learns_the_special_tokens(served: Served) -> None:
    info = served.http().get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert "message" in info["chat_template"] or "messages" in info["chat_template"]
