"""What goes up to the hub: the checked file and its card, in one commit; a card written by hand stays."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from sparsepack.errors import ArtifactError, UserError
from sparsepack.publish.card import MARK
from sparsepack.publish.hub import push


class Hub:
    """What `HfApi` is called for here, with what it was given."""

    def __init__(self, card: bytes | None = None) -> None:
        self.card, self.commits, self.created = card, [], []

    def create_repo(self, name: str, **asked: Any) -> None:
        if "/" not in name:
            raise HFValidationError(f"Repo id must be in the form 'owner/name': {name}")
        self.created.append((name, asked))

    def file_exists(self, name: str, file: str, revision: str | None) -> bool:
        return self.card is not None

    def create_commit(self, name: str, operations: list[Any], **asked: Any) -> Any:
        self.commits.append(({operation.path_in_repo: operation for operation in operations}, asked))
        return type("Commit", (), {"commit_url": f"https://hub/{name}/commit/1"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)

    def download(name: str, file: str, revision: str | None) -> str:
        (tmp_path / "there.md").write_bytes(made.card or b"")
        return str(tmp_path / "there.md")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return made


def test_the_file_and_its_card_go_up_in_one_commit(work: Path, hub: Hub) -> None:
    address = push(work / "model.gguf", "me/tiny", [work / "report.json"], private=True)
    assert address == "https://hub/me/tiny/commit/1"
    assert hub.created == [("me/tiny", {"private": True, "exist_ok": True})]
    [(files, asked)] = hub.commits
    assert sorted(files) == ["README.md", "model.gguf"]
    assert files["model.gguf"].path_or_fileobj == str(work / "model.gguf")
    assert MARK.encode() in files["README.md"].path_or_fileobj
    assert asked["commit_message"] == "Add model.gguf"


@pytest.mark.parametrize(
    ("card", "replaced"), [(f"{MARK}\n# old".encode(), True), (b"# By hand", False), (b"caf\xe9", False)]
)
def test_only_our_own_card_is_replaced(
    work: Path, hub: Hub, card: bytes, replaced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.card = card
    push(work / "model.gguf", "me/tiny")
    assert ("README.md" in hub.commits[0][0]) == replaced
    assert ("is kept" in capsys.readouterr().err) == (not replaced)


def test_a_damaged_artifact_stays_here(work: Path, hub: Hub, tmp_path: Path) -> None:
    data = bytearray((work / "model.gguf").read_bytes())
    data[-100] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ArtifactError):
        push(tmp_path / "m.gguf", "me/tiny")
    assert hub.created == []


def test_what_the_hub_says_is_told_in_one_line(work: Path, hub: Hub) -> None:
    with pytest.raises(UserError, match="owner/name") as refused:
        push(work / "model.gguf", "tiny")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_a_network_that_fails_is_one_line(library: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = pytest.importorskip(library).ConnectError("Name or service not known")

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fails)
    with pytest.raises(UserError, match=r"cannot be reached \(Name or service not known\)"):
        push(work / "model.gguf", "me/tiny")


def test_offline_it_says_so(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub refuses or cannot be reached"):
        push(work / "model.gguf", "me/tiny")
