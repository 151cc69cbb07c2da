"""What every test may use."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts: SPARSEPACK_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"{folder} holds no models; set SPARSEPACK_SHARED")
    return folder
