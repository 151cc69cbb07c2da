"""The routes of the page's files."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
}
"""By its path, each file and its media type."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no text that becomes HTML or a script."""

HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # kept, but each time with the question whether it is still the same
}


def page_routes() -> list[Route]:
    """Return a route for each file, which is read now: a server keeps the page that belongs to it."""
    folder = Path(__file__).parent
    return [Route(path, _endpoint((folder / name).read_bytes(), kind)) for path, (name, kind) in FILES.items()]


def _endpoint(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return send
