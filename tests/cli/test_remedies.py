"""What the command line answers where something else was given than is expected: what it is, and what to do."""

import json
from pathlib import Path

import pytest
from commands_for_tests import sparsepack


def refused(*command: object) -> str:
    """The one line of a refusal."""
    result = sparsepack(*command)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "p"
    made = sparsepack("prune", "shipped:tiny", "--keep", 2, "--of", 4, "--method", "magnitude", "-o", folder)
    assert made.exit_code == 0, made.output
    return folder


@pytest.mark.parametrize("verb", ["generate", "serve", "tune", "bench"])
def test_a_checkpoint_in_place_of_an_artifact_is_told_to_be_packed_first(verb: str, pruned: Path) -> None:
    prompt = ["--prompt", "a"] if verb == "generate" else []
    said = refused(verb, pruned, *prompt)
    assert f"{pruned}: a checkpoint, which is not packed yet" in said
    assert said.endswith(f"pack it first: sparsepack pack {pruned} -o p.gguf")


def test_inspect_shows_pruned_and_plain_checkpoints(pruned: Path, tmp_path: Path) -> None:
    shown = sparsepack("inspect", pruned).output
    assert "pruned from shipped:tiny (6adcb40dd02a) by magnitude: keep 2 of 4 in 21 matrices" in shown
    found = json.loads(sparsepack("inspect", pruned, "--json", "-").stdout)
    assert (found["kind"], found["layers"], found["pruned"]["matrices"]) == ("checkpoint", 3, {"2 of 4": 21})
    (pruned / "sparsepack_prune.json").rename(tmp_path / "record")
    try:
        plain = sparsepack("inspect", pruned)
    finally:
        (tmp_path / "record").rename(pruned / "sparsepack_prune.json")
    assert plain.exit_code == 0, plain.output
    assert "not pruned by sparsepack" in plain.output
    assert "formats that can hold" in plain.output


def test_a_site_that_matches_nothing_is_called_as_it_was_given(tmp_path: Path) -> None:
    asked = ["prune", "shipped:tiny", "--keep", 2, "--of", 4, "--method", "magnitude", "-o", tmp_path / "p"]
    assert "site 'nosite' matches no site" in refused(*asked, "--site", "nosite", 2, 4)


def test_verify_against_another_model_begins_with_what_is_wrong(tmp_path: Path, pruned: Path) -> None:
    assert sparsepack("pack", "shipped:tiny", "-o", tmp_path / "m.gguf").exit_code == 0
    result = sparsepack("verify", tmp_path / "m.gguf", "--against", pruned)
    assert result.exit_code == 1
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"{tmp_path / 'm.gguf'}: FAILED: packed from shipped:tiny ")
    assert first.endswith("another model, or another version of it")


def test_one_thread_is_written_so(tmp_path: Path) -> None:
    assert sparsepack("pack", "shipped:tiny", "-o", tmp_path / "m.gguf").exit_code == 0
    result = sparsepack("generate", tmp_path / "m.gguf", "--prompt", "a", "-n", 1, "--threads", 1)
    assert ", 1 thread\n" in result.stderr


def test_a_text_that_cannot_be_had_is_named_with_the_key_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsepack.errors import TextError

    def unreachable(names: object) -> None:
        raise TextError("a/b: neither a local file nor a data set that can be reached")

    monkeypatch.setattr("sparsepack.files.text.read_text", unreachable)
    said = refused(
        "run", "relu-neurons", "--set", "model=shipped:tiny", "--set", "calibrate.context=64", "--work", tmp_path / "w"
    )
    assert "calibrate.text: a/b: neither" in said
    assert said.endswith("for a text of yours: --set calibrate.text=FILE")
