"""The protocols that the server speaks, a module each; `PROTOCOLS` is the table of them."""

from starlette.responses import JSONResponse

from sparsepack.serve.protocols.openai import OPENAI
from sparsepack.serve.protocols.protocol import ClientProtocol
from sparsepack.serve.refusals import Refusal

PROTOCOLS: tuple[ClientProtocol, ...] = (OPENAI,)

_BY_PATH = {path: protocol for protocol in PROTOCOLS for path in protocol.paths}


def refusal_response(path: str, refusal: Refusal) -> JSONResponse:
    """Return the answer that refuses a request, in the form of the protocol of its path, else of OpenAI's."""
    return JSONResponse(_BY_PATH.get(path, OPENAI).error(refusal), refusal.status, refusal.headers())
