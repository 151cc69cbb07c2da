"""Text to tokens and back, as llama.cpp's and vLLM's servers have it; and the text that a chat template makes."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, model_validator

from sparsepack.models.tokenizer.sandbox import SandboxError
from sparsepack.serve.liberal import Json, unsupported
from sparsepack.serve.messages import Part
from sparsepack.serve.protocols.protocol import ClientProtocol, Query
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, TokenId, read_request

if TYPE_CHECKING:
    from sparsepack.serve.app import Service


class TokenizeBody(Part):
    """The body of POST /tokenize.

    content, add_special       -- llama.cpp's: text, and whether BOS goes before it; not, unless given
    prompt, add_special_tokens -- vLLM's: the same, but BOS goes before it unless given
    with_pieces, return_token_strs -- llama.cpp's and vLLM's: the text of each token, too
    """

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_text(self) -> "TokenizeBody":
        if (self.content is None) == (self.prompt is None):
            raise unsupported("content", "expected one of content, prompt and messages")
        if self.parse_special is False:
            raise unsupported(
                "parse_special", "special tokens that a text spells are always taken as such; leave it out"
            )
        return self


class TokenizeForm(BaseModel):
    """What tells a conversation from a text."""

    messages: Any = None


class DetokenizeBody(Part):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenize(body: bytes, service: "Service") -> Json:
    """Return the tokens of a text, or of a conversation (vLLM: `messages`). Raises `Refusal`."""
    if read_request(TokenizeForm, body).messages is not None:
        ids = service.preparer.chat_tokens(read_request(ChatRequest, body, service.options.strict))
        return _tokens(ids, service)
    given = read_request(TokenizeBody, body, service.options.strict)
    if given.content is not None:
        ids = service.prompts.plain(given.content, bool(given.add_special or given.add_special_tokens), fits=False)
    else:
        ids = service.prompts.plain(given.prompt or "", given.add_special_tokens is not False, fits=False)
    answer = _tokens(ids, service)
    pieces = [service.prompts.bytes_of.of(id).decode(errors="replace") for id in ids]
    if given.with_pieces:
        answer["tokens"] = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)]
    if given.return_token_strs:
        answer["token_strs"] = pieces
    return answer


def _tokens(ids: list[int], service: "Service") -> Json:
    return {"tokens": ids, "count": len(ids), "max_model_len": service.prompts.context}


def detokenize(body: bytes, service: "Service") -> Json:
    """Return the text of tokens, special ones spelt out. Raises `Refusal`."""
    ids = read_request(DetokenizeBody, body, service.options.strict).tokens
    vocabulary = service.prompts.model.engine.architecture.vocabulary
    if max(ids, default=0) >= vocabulary:
        raise Refusal(400, f"tokens: token {max(ids)}; the model has 0 to {vocabulary - 1}", "tokens", "invalid_value")
    try:
        text = service.prompts.model.tokenizer.decode(ids, skip_special_tokens=False)
    except SandboxError as error:
        raise Refusal(400, f"tokens: the model's tokenizer cannot decode them ({error})", "tokens") from error
    return {"content": text, "prompt": text}


def tokenizer_info(body: bytes, service: "Service") -> Json:
    """Return the chat template and the special tokens, as vLLM does for clients that tokenise by this server."""
    model = service.prompts.model
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
    return {"chat_template": model.template(with_tools=False), **names, **model.packed.named_tokens(model.tokenizer)}


def apply_template(body: bytes, service: "Service") -> Json:
    """Return the text that the chat template makes of a conversation. Raises `Refusal`."""
    return {"prompt": service.preparer.chat_text(read_request(ChatRequest, body, service.options.strict))}


def refuse_embeddings(body: bytes, service: "Service") -> Any:
    """Raise `Refusal`: hidden states of a model that predicts the next token are poor embeddings."""
    message = "this server makes no embeddings: hidden states of a model for text are poor ones; use a model for them"
    raise Refusal(501, message, code="unsupported_endpoint")


TOKENS = ClientProtocol(
    endpoints=(),
    queries=(
        Query("POST", "/tokenize", tokenize),
        Query("POST", "/detokenize", detokenize),
        Query("GET", "/tokenizer_info", tokenizer_info),
        Query("POST", "/apply-template", apply_template),
        Query("POST", "/v1/embeddings", refuse_embeddings),
    ),
)
