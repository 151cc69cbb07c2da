"""Values of another type, as Python takes them, are refused in one line that names them, before anything is opened."""

import pydoc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sparsepack
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import UserError
from sparsepack.option import check_options, option, with_paths
from sparsepack.runtime.options import EngineOptions

CALLS: dict[str, Callable[[], Any]] = {
    "include 'blk.0.attn_in': expected a tuple, each of it a text": lambda: AllocationOptions(
        0.5,
        include="blk.0.attn_in",  # type: ignore[arg-type]
    ).check(),
    "sparsity '0.5': expected a number": lambda: AllocationOptions("0.5").check(),  # type: ignore[arg-type]
    "threads '2': expected a whole number": lambda: EngineOptions(threads="2"),  # type: ignore[arg-type]
    "perplexity 'text': expected a tuple": lambda: sparsepack.evaluate(
        sparsepack.EvalRequest("shipped:tiny", perplexity="text")  # type: ignore[arg-type]
    ),
    "allocation '0.5': expected AllocationOptions": lambda: sparsepack.pack(
        sparsepack.PackRequest("shipped:tiny", Path("m.gguf"), allocation=0.5)  # type: ignore[arg-type]
    ),
    "request 'shipped:tiny': expected PackRequest": lambda: sparsepack.pack("shipped:tiny"),  # type: ignore[arg-type]
    "path '3': expected a path": lambda: sparsepack.load(3),  # type: ignore[arg-type]
    "path 'None': expected a path": lambda: sparsepack.verify(None),  # type: ignore[arg-type]
    "options '{}': expected CalibrateOptions": lambda: sparsepack.calibrate(
        "shipped:tiny",
        "shipped:train",
        Path("c"),
        {},  # type: ignore[arg-type]
    ),
    "text '3': expected Text or a text": lambda: sparsepack.calibrate("shipped:tiny", 3, Path("c")),  # type: ignore[arg-type]
    "options 'None': expected PruneOptions": lambda: sparsepack.prune("shipped:tiny", Path("p"), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", CALLS)
def test_a_value_of_another_type_is_one_line(said: str) -> None:
    with pytest.raises(UserError) as refused:
        CALLS[said]()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_loaded_model_refuses_values_of_another_type(tmp_path: Path) -> None:
    sparsepack.pack(sparsepack.PackRequest("shipped:tiny", tmp_path / "m.gguf"))
    model = sparsepack.load(tmp_path / "m.gguf")
    wrong: tuple[Callable[[], Any], ...] = (
        lambda: model.generate(3),  # type: ignore[arg-type]
        lambda: model.generate("a", stop=3),
        lambda: model.generate("a", tokens="3"),
        lambda: model.generate_together("abc"),
        lambda: model.chat("hello"),  # type: ignore[arg-type]
        lambda: model.logits(3),  # type: ignore[arg-type]
    )
    for call in wrong:
        with pytest.raises(UserError, match=r"expected .*, not (int|str)"):
            call()


@dataclass(frozen=True)
class _Asked:
    names: tuple[str, ...] = option("Names.", default=())
    share: float | None = option("Share.", default=None)
    file: Path | None = None


def test_whole_numbers_lists_and_texts_stand_for_numbers_tuples_and_paths() -> None:
    asked = _Asked(["a", "b"], 1, "c")  # type: ignore[arg-type]
    check_options(asked, UserError)
    assert with_paths(asked).file == Path("c")
    for wrong in (_Asked((1,)), _Asked(share=True), _Asked(file=3)):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            check_options(wrong, UserError)


def test_help_shows_functions_with_their_parameters() -> None:
    for name in ("load", "pack", "prune", "evaluate", "verify"):
        assert f"function {name} in module" in pydoc.render_doc(getattr(sparsepack, name), renderer=pydoc.plaintext)
    assert "collection.calibrate" in pydoc.render_doc(sparsepack.calibrate, renderer=pydoc.plaintext)  # a package
