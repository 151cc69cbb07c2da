"""A model that was rotated, and perhaps pruned and packed then, beside each of the models that it was made from."""

from pathlib import Path

import pytest

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.rotation import rotate
from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.packing import PackRequest, pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model rotated, that packed, pruned, and the pruned one packed."""
    folder = tmp_path_factory.mktemp("made")
    calibrate("shipped:tiny", "shipped:heldout", folder / "c", CalibrateOptions(context=64, samples=4))
    rotate("shipped:tiny", folder / "c", folder / "rotated")
    prune(folder / "rotated", folder / "pruned", PruneOptions(14, 16, method="magnitude"))
    for name in ("rotated", "pruned"):
        pack(PackRequest(str(folder / name), folder / f"{name}.gguf"))
    return folder


def against(subject: Path, source: str, **asked: object) -> float:
    """The divergence from a model that the subject was made from."""
    request = EvalRequest(str(subject), perplexity=("shipped:heldout",), context=64, windows=2, against=source, **asked)
    found: float = evaluate(request)["perplexity"][0]["kl_divergence"]["value"]
    return found


def test_a_rotated_model_is_the_model(made: Path) -> None:
    assert abs(against(made / "rotated", "shipped:tiny")) < 1e-6


@pytest.mark.parametrize("backend", ["transformers", "reference"])
def test_what_is_packed_of_it_is_compared_with_both(made: Path, backend: str) -> None:
    found = [
        against(made / "rotated.gguf", source, runtime=backend) for source in ("shipped:tiny", str(made / "rotated"))
    ]
    assert 0 < found[0] < 0.2
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("name", ["pruned", "pruned.gguf"])
def test_a_model_that_was_pruned_then_is_compared_with_all(made: Path, name: str) -> None:
    found = [against(made / name, source) for source in ("shipped:tiny", str(made / "rotated"))]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert abs(against(made / name, str(made / "pruned"))) < found[0]


def test_another_model_is_refused(made: Path) -> None:
    for subject, source in (("rotated", "pruned"), ("rotated.gguf", "pruned")):
        with pytest.raises(UserError, match="not the model that"):
            against(made / subject, str(made / source))
