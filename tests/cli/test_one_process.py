"""Verbs that several workers cannot share refuse to run as one of them."""

from collections.abc import Iterator

import click
import pytest
from commands_for_tests import fails

from sparsepack.cli import main
from sparsepack.errors import UserError

SHARED = {"calibrate", "thresholds", "prune", "eval", "rotate", "pack"}


def _verbs(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _verbs(inner)
    else:
        yield command


OTHERS = {str(verb.name): verb for verb in _verbs(main) if verb.name not in SHARED}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_other_verb_refuses_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    verb = OTHERS[name]
    with pytest.raises(
        UserError, match=f"^{name} runs in one process; start it without torchrun, or unset WORLD_SIZE$"
    ):
        verb.invoke(click.Context(verb))


def test_a_worker_that_is_not_told_where_the_others_are_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = tmp_path / "t.txt"
    text.write_text("words")
    line = fails("calibrate", "shipped:tiny", "--text", text, "-o", tmp_path / "c")
    assert "WORLD_SIZE says that there are 2 workers, but RANK, MASTER_ADDR, MASTER_PORT are not set" in line
