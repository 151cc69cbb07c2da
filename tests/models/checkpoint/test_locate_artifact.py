"""A packed GGUF by its name on the hub, for Python and for the command line."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import sparsepack
from sparsepack.cli.app import main
from sparsepack.errors import ArtifactError
from sparsepack.models.checkpoint.locate import located_artifact


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that stands for the repository me/tiny."""
    files = tmp_path / "hub"
    files.mkdir()

    def download(repository: str, file: str) -> str:
        if repository != "me/tiny" or not (files / file).exists():
            raise OSError("404: not found\nand more")
        return str(files / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files", lambda self, repository: sorted(file.name for file in files.iterdir())
    )
    return files


def test_the_one_gguf_of_a_repository_or_a_named_one_is_downloaded(hub: Path) -> None:
    for name in ("README.md", "a.gguf"):
        (hub / name).touch()
    assert located_artifact("me/tiny") == hub / "a.gguf"
    (hub / "b.gguf").touch()
    assert located_artifact("me/tiny:b.gguf") == hub / "b.gguf"
    with pytest.raises(ArtifactError, match=r"2 GGUFs on the hub \(a.gguf, b.gguf\); expected one, or me/tiny:FILE"):
        located_artifact("me/tiny")
    with pytest.raises(ArtifactError, match=r"^me/tiny:c.gguf: neither a file here .* \(404: not found\)$"):
        located_artifact("me/tiny:c.gguf")


def test_paths_are_not_looked_for_on_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("me").mkdir()
    Path("me/tiny").touch()
    for name in ("me/tiny", "m.gguf", "no/m.gguf", "/no/m", "./no/m", "a/b/c"):
        assert located_artifact(name) == Path(name)


def test_python_and_commands_take_the_name(hub: Path) -> None:
    sparsepack.pack(sparsepack.PackRequest("shipped:tiny", hub / "tiny.gguf"))
    assert "shipped:tiny" in repr(sparsepack.load("me/tiny"))
    run = CliRunner().invoke(main, ["generate", "me/tiny:tiny.gguf", "--prompt", "The", "-n", "2"])
    assert run.exit_code == 0, run.output
