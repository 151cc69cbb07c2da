"""`sparsepack quickstart`."""

from pathlib import Path

import click

from sparsepack.cli.command import PATH, Ruled, command, emit, from_options, json_output
from sparsepack.cli.shared import usable_device
from sparsepack.option import not_with
from sparsepack.quickstarting import QuickstartOptions, quickstart_table


def _device(context: click.Context, parameter: click.Parameter, name: str) -> str:
    return name if name == "auto" else usable_device(context, parameter, name)


@command(short_help="Download, calibrate, pack and time a model by one command.")
@click.argument("model")
@from_options(QuickstartOptions, "--text")
@from_options(QuickstartOptions, "--device", callback=_device)
@click.option("-o", "--output", "work", type=PATH, help="Folder of the outputs (default work/NAME).")
@click.option(
    "--chat", cls=Ruled, is_flag=True, counts=(not_with("json_path", "-"),), help="Converse with the model at the end."
)
@json_output
def quickstart(
    model: str, text: tuple[str, ...], device: str, work: Path | None, chat: bool, json_path: str | None
) -> None:
    """From the name of MODEL to a packed file, in minutes.

    It downloads the model, chooses a format by the model's size, the machine and its memory, calibrates and packs,
    prints what was lost, how fast the file is and how much memory it takes, and ends with the next commands. A run
    that was stopped goes on when it is started again.

    Without --text the model is calibrated on text that it writes itself. Everything lies in work/NAME, as of a recipe:
    the file is model.gguf there.
    """
    from sparsepack.quickstarting import quickstart as run

    result = run(model, work, QuickstartOptions(text, device))
    emit(result.report, json_path, lambda report: quickstart_table(result))
    if chat:
        from sparsepack.cli.talk import converse
        from sparsepack.loading import load
        from sparsepack.runtime.options import CHAT_TOKENS, EngineOptions, GenerateOptions

        packed = load(result.path, options=EngineOptions(device=result.choice.device))
        converse(packed, (), GenerateOptions(CHAT_TOKENS), None, None)
