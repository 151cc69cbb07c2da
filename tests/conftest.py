"""What every test may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepack.runtime.cpu.geometry import profiled


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `sparsepack profile` found for the user must change no test, and no test what it found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        profiled.cache_clear()
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts: SPARSEPACK_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"{folder} holds no models; set SPARSEPACK_SHARED")
    return folder
