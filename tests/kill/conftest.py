"""What the tests share: a process that forks, and what the verbs read."""

from collections.abc import Iterator

import pytest
from forked import Forker
from places import Place
from verbs import VERBS, calibrate_more, write_inputs


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The process and the inputs, everything that the verbs import imported."""
    folder = tmp_path_factory.mktemp("kill")
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    forker = Forker(folder)
    for command in (
        VERBS["calibrate"].command(inputs, inputs, False),
        calibrate_more(inputs),
        VERBS["thresholds global"].command(inputs, inputs, False),
        VERBS["prune"].command(inputs, inputs, False),
        VERBS["rotate"].command(inputs, inputs, False),
        VERBS["distil"].command(inputs, inputs, False),
        VERBS["distil pruned"].command(inputs, inputs, False),
        VERBS["pack slid"].command(inputs, inputs, False),
        VERBS["run"].command(inputs, inputs, False),
    ):
        ended = forker.run(command, inputs, inside=True)
        assert ended.status == 0, ended.said
    yield Place(forker, inputs, folder)
    forker.close()
