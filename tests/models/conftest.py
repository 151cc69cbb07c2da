"""What the tests of models share: random checkpoints, made once."""

import pytest
from model_variants import FOLDERS
from models_for_tests import make_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """name -> folder of a random checkpoint, made when it is first asked for."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp("model"), **FOLDERS[name])
        return made[name]

    return folder
