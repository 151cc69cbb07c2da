"""Several generations on one model: a newer one ends an older one, and threads never mix their texts."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifacts_for_tests import write_zigzag

from sparsepack.errors import UserError
from sparsepack.loading import Model, load
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.options import GenerateOptions

FIRST, SECOND = "Once upon a time", "The for statement"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several") / "tiny.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return replace(load(path, threads=1), chat_template=TEMPLATE)


OTHERS: dict[str, Callable[[Model], Any]] = {
    "generate": lambda model: model.generate(SECOND, tokens=6).result(),
    "generate that nobody asks": lambda model: model.generate(SECOND, tokens=6),
    "chat": lambda model: model.chat([{"role": "user", "content": SECOND}], tokens=6).result(),
    "generate_together": lambda model: model.generate_together([SECOND], GenerateOptions(6)),
    "logits": lambda model: model.logits(SECOND),
    "reset": lambda model: model.engine.reset(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_newer_use_of_the_model_ends_an_older_generation(model: Model, other: Callable[[Model], Any]) -> None:
    alone = model.generate(FIRST, tokens=12).result()
    older = model.generate(FIRST, tokens=12)
    first = next(older)
    kept = other(model)
    result = older.result()
    assert result.reason == "cancelled"
    assert result.text == first
    assert alone.text.startswith(first)
    assert model.generate(FIRST, tokens=12).result().text == alone.text
    del kept


def test_a_generation_that_has_not_begun_makes_its_whole_text(model: Model) -> None:
    alone = [model.generate(prompt, tokens=8).result().text for prompt in (FIRST, SECOND)]
    waiting = [model.generate(prompt, tokens=8) for prompt in (FIRST, SECOND)]
    assert [generation.result().text for generation in waiting] == alone
    assert [generation.result().reason for generation in waiting] == ["tokens", "tokens"]


def test_threads_that_ask_for_results_take_turns(model: Model) -> None:
    prompts = [FIRST, SECOND] * 4
    alone = [model.generate(prompt, tokens=8).result().text for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: model.generate(prompt, tokens=8).result().text, prompts))
    assert together == alone


def test_a_thread_is_refused_while_another_one_iterates_and_not_after(model: Model) -> None:
    alone = model.generate(FIRST, tokens=8).result().text
    refusals: list[str] = []

    def other() -> None:
        for use in (OTHERS["generate"], OTHERS["logits"]):
            try:
                use(model)
            except UserError as error:
                refusals.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    generation = model.generate(FIRST, tokens=8)
    pieces = [next(generation)]
    in_a_thread()
    assert len(refusals) == 2
    assert all("makes a text with this model" in each for each in refusals)
    assert "".join([*pieces, *generation]) == alone, "the text was left alone"
    in_a_thread()
    generation = model.generate(FIRST, tokens=8)
    next(generation)
    generation.close()
    in_a_thread()
    generation = model.generate(FIRST, tokens=8)
    next(generation)
    del generation
    in_a_thread()
    assert len(refusals) == 2, "a generation that has ended, was closed or dropped refuses nobody"
