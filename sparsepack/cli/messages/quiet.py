"""Messages of a command on stderr while it runs: progress and notes, or with `--quiet` nothing."""

import functools
from typing import Any

import click

from sparsepack.progress import be_quiet, going_on

_HELP = "Show no progress and no notes; results and errors are still shown."


def _group(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    be_quiet(asked)


def _verb(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:  # or the group may have been asked
        be_quiet(True)


quiet_option = click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_group, help=_HELP)
"""The option stands before the verb, `sparsepack --quiet eval ...`; `add_quiet` takes the option after the verb,
too."""


def add_quiet(verb: click.Command) -> None:
    """Give a verb the option."""
    verb.params.append(click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, callback=_verb, help=_HELP))


def add_signs_of_life(verb: click.Command) -> None:
    """Let a verb that can take minutes say now and then that it goes on, where stderr is no terminal."""
    run = verb.callback
    assert run is not None

    @functools.wraps(run)
    def going(*arguments: Any, **options: Any) -> Any:
        with going_on(str(verb.name)):
            return run(*arguments, **options)

    verb.callback = going
