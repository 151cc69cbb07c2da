"""The tables of models in docs/formats.md are what the rows say, and the rows say what is refused."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from families_table import FORMAT_GROUPS, MODELS, NO, PAGE, YES, family_of_model, holds, runs, tables, takes
from models_for_tests import AS_LLAMA_CPP, EXPERTS, SMALL, make_model, make_opt

from sparsepack.calibrate.distillation import check_model as check_distilled
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.refitting import predicted_refit
from sparsepack.errors import UserError
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import FAMILIES, stream_of
from sparsepack.runtime.backends import BACKENDS

ROOT = Path(__file__).parents[2]
every_family = pytest.mark.parametrize("family", FAMILIES)


def test_the_page_has_the_tables() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for table in tables().split("\n\n"):
        assert table in page, "python tools/families_table.py --write"


def test_every_family_has_a_row_in_each_table() -> None:
    assert {family for family, _ in MODELS.values()} == set(FAMILIES)
    for one in tables().split("\n\n"):
        rows = [row.split("|")[1:-1] for row in one.splitlines()[2:]]
        assert [row[0].strip() for row in rows] == [*MODELS]
        assert {cell.strip() for row in rows for cell in row[1:]} == {YES, NO}


def raises(action: object, *of: object) -> bool:
    try:
        action(*of)  # type: ignore[operator]
    except UserError:
        return True
    return False


@cache
def made(family: str, folder: Path) -> Checkpoint:
    changes = AS_LLAMA_CPP.get(family, {})
    path = make_opt(folder / family) if family == "opt" else make_model(folder / family, family, **changes)
    if family in SMALL and family not in ("opt", "arcee", "nemotron", "apertus"):
        config = json.loads((path / "config.json").read_text())
        field = FAMILIES[family].fields.get("hidden_act", "hidden_act")
        (path / "config.json").write_text(json.dumps({**config, field: "relu"}))
    return open_checkpoint(path)


@every_family
def test_what_the_table_says_no_to_is_refused_and_nothing_else(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint, row = made(family, tmp_path_factory.getbasetemp()), FAMILIES[family]
    assert takes("rotate", row) != raises(stream_of, row, "m")
    assert takes("distil", row) != raises(check_distilled, checkpoint)
    assert takes("refit", row) != raises(predicted_refit, checkpoint, FORMATS["zigzag-q4_k"], RefitOptions(refit=True))
    assert takes("pack", row) != raises(lambda: checkpoint.architecture)
    for name in FORMAT_GROUPS:
        if name == "q4_k" and family in SMALL:
            continue  # llama.cpp does not know ReLU in them
        assert holds(FORMATS[name], row) != raises(FORMATS[name].check_model, checkpoint), name


def test_a_model_with_states_is_neither_rotated_nor_a_gguf_where_others_of_its_row_are() -> None:
    without, with_states = (family_of_model(*MODELS[name]) for name in ("Granite 4 (dense)", "Granite 4 H (dense)"))
    for can, family in ((True, without), (False, with_states)):
        assert takes("rotate", family) == holds(FORMATS["q4_k"], family) == can
        assert raises(stream_of, family, "m") != can


def test_a_trait_that_a_backend_lacks_takes_a_yes_away() -> None:
    cuda, gemma = BACKENDS["cuda"], FAMILIES["gemma2"]
    assert runs(cuda, gemma, {})
    poorer = replace(cuda, traits=frozenset())
    assert not runs(poorer, gemma, {})
    assert runs(poorer, FAMILIES["llama"], {})
    made = {changes.get("model_type", name) for name, changes in (SMALL | EXPERTS).items()}
    assert made | {"opt"} == set(FAMILIES)
