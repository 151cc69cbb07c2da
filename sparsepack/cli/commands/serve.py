"""`sparsepack serve`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sparsepack.cli.command import PATH, command, from_options, options_from
from sparsepack.cli.shared import (
    ARTIFACT,
    backend_option,
    device_option,
    engine_flags,
    engine_options,
    for_texts,
    slots,
    text_of,
    torch_threads,
)
from sparsepack.errors import UserError, requires_extra
from sparsepack.serve.options import ServeOptions

KEY = "SPARSEPACK_API_KEY"


def _keys(context: click.Context, parameter: click.Parameter, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a key that no client could send."""
    for key in keys:
        if not (key and key.isascii() and key.isprintable() and not any(map(str.isspace, key))):
            raise UserError(f"--api-key, {KEY}: expected at least one character, ASCII without spaces")
    return keys


def _template(context: click.Context, parameter: click.Parameter, path: Path | None) -> str | None:
    """A file's text."""
    try:
        return None if path is None else text_of(path)
    except UserError as error:
        raise UserError(f"--chat-template {error}") from error


@command(short_help="Serve a packed model by OpenAI's, Anthropic's and Ollama's APIs.")
@click.argument("path", type=ARTIFACT)
@options_from(ServeOptions, "--host", "--port")
@click.option(
    "--api-key",
    "api_keys",
    envvar=KEY,
    multiple=True,
    callback=_keys,
    help=f"Key that clients must send; each key has a prefix cache of its own. Repeats. Safer in the environment, as "
    f"{KEY}, with spaces between keys: others can see a command line.",
)
@from_options(ServeOptions, "--model-name")
@click.option(
    "--chat-template",
    type=PATH,
    callback=_template,
    help="A file with the template of chats, in place of the model's own.",
)
@options_from(ServeOptions, "--strict", "--sequences", "--queue", "--prefix-cache", "--connections", "--reasoning")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Let web pages from there ask, https://example.org, or * for all. Repeats.",
)
@options_from(ServeOptions, "--grace", "--send-timeout", "--receive-timeout")
@for_texts
@slots
@engine_flags
@device_option
@backend_option
@torch_threads
def serve(path: Path, chat_template: str | None, **asked: Any) -> None:
    """Serve a packed model over HTTP, by the protocols of OpenAI, Anthropic and Ollama, and as a page for browsers.

    Several texts are made together; others wait in a queue. What a request does not say of how tokens are chosen is as
    the model's makers suggest in its generation_config.json, and else as at OpenAI. Ctrl-C or SIGTERM end it.
    docs/serve.md says more.
    """
    engine = engine_options(asked, ServeOptions)
    with requires_extra("serve", "serve"):
        from sparsepack.serve.server import bind_socket
        from sparsepack.serve.server import serve as serve_model
    from sparsepack.loading import describe_runtime, load
    from sparsepack.progress import say
    from sparsepack.runtime.generation.generate import describe_suggestions

    options = ServeOptions(**asked)
    engine = replace(engine, sequences=options.sequences)
    with bind_socket(options.host, options.port, options.send_timeout) as listening:  # before a large file is read
        model = load(path, options=engine)
        model = replace(model, chat_template=chat_template or model.chat_template)
        say(describe_runtime(model.engine))
        if model.packed.generation:
            say(describe_suggestions(model.packed.generation))
        serve_model(model, path.resolve().stem, options, listening)
