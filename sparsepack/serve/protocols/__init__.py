"""The protocols that the server speaks, a module each; `PROTOCOLS` is the table of them."""

from starlette.responses import JSONResponse

from sparsepack.serve.protocols.anthropic import ANTHROPIC
from sparsepack.serve.protocols.ollama import OLLAMA
from sparsepack.serve.protocols.openai import OPENAI
from sparsepack.serve.protocols.protocol import ClientProtocol
from sparsepack.serve.protocols.responses import RESPONSES
from sparsepack.serve.protocols.tokens import TOKENS
from sparsepack.serve.refusals import Refusal

PROTOCOLS: tuple[ClientProtocol, ...] = (OPENAI, RESPONSES, ANTHROPIC, OLLAMA, TOKENS)


def refusal_response(path: str, refusal: Refusal) -> JSONResponse:
    """Return the answer that refuses a request, in the form of the protocol of its path or of one above it, else of
    OpenAI's."""
    protocol = next((one for one in PROTOCOLS if any(f"{path}/".startswith(f"{own}/") for own in one.paths)), OPENAI)
    return JSONResponse(protocol.error(refusal), refusal.status, refusal.headers())
