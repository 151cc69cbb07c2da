"""What goes up to the hub: the checked file and its card, in one commit; a card written by hand stays."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from commands_for_tests import fails, succeeds
from huggingface_hub.errors import HFValidationError

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import ArtifactError, UserError
from sparsepack.packing import PackRequest, pack
from sparsepack.publish.card import MARK
from sparsepack.publish.hub import push


class Hub:
    """What `HfApi` is called for here, with what it was given."""

    def __init__(self, card: bytes | None = None) -> None:
        self.card, self.commits, self.created = card, [], []

    def create_repo(self, name: str, **asked: Any) -> None:
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


@pytest.mark.parametrize("name", ["tiny", "", "me/", "me/a/b", "../tiny", "me/tiny.git", "me/t iny", "me/x\n"])
def test_a_name_that_no_repository_can_have_is_refused_before_the_hub_or_the_artifact_is_asked(
    hub: Hub, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=r"expected OWNER/NAME") as refused:
        push(tmp_path / "none.gguf", name)
    assert "no such file" not in str(refused.value)
    assert hub.created == []


def test_what_the_hub_says_is_told_in_one_line(work: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str, **asked: Any) -> None:
        raise HFValidationError("no repository\nof that name")

    monkeypatch.setattr(hub, "create_repo", refuses)
    with pytest.raises(UserError, match="no repository") as refused:
        push(work / "model.gguf", "me/tiny")
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that is a folder."""
    folder = tmp_path_factory.mktemp("slid")
    sparsepack.prune("shipped:tiny", folder / "pruned", PruneOptions(6, 8, method="magnitude"))
    pack(PackRequest(str(folder / "pruned"), folder / "slid", format="slide-int8"))
    return folder / "slid"


@pytest.fixture
def littered(packed: Path, tmp_path: Path) -> Path:
    """That folder, with what people have lying about."""
    folder = tmp_path / "slid"
    shutil.copytree(packed, folder)
    (folder / ".env").write_text("TOKEN=secret")
    (folder / "notes.txt").symlink_to("/etc/passwd")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[remote]")
    (folder / "more").mkdir()
    (folder / "more" / "draft.md").write_text("x")
    (folder / "README.md").write_text("mine")
    return folder


def test_only_the_files_that_the_manifest_lists_and_the_card_go_up(
    littered: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    push(littered, "me/tiny")
    [(files, asked)] = hub.commits
    listed = json.loads((littered / "sparsepack.json").read_text())["files"]
    assert set(files) == {"README.md", "sparsepack.json", *listed}
    assert MARK.encode() in files["README.md"].path_or_fileobj
    assert asked["commit_message"] == "Add slid"
    assert "4 other files or folders" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "sparsepack.json"])
def test_a_link_in_the_place_of_a_file_is_not_followed(littered: Path, hub: Hub, tmp_path: Path, name: str) -> None:
    (littered / name).rename(tmp_path / "elsewhere")
    (littered / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=rf"{name}: not uploaded, since it is a link"):
        push(littered, "me/tiny")
    assert hub.created == []


def test_a_dry_run_lists_files_and_bytes_and_asks_no_hub(littered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    said = succeeds("push", littered, "me/tiny", "--dry-run")
    for name in ("config.json", "model.safetensors", "sparsepack.json"):
        assert f"| {name} | {(littered / name).stat().st_size:,} |" in " ".join(said.split())
    assert "| README.md |" in " ".join(said.split())
    assert "bytes would go up; 4 other files or folders stay here" in said
    assert ".env" not in said
    assert "expected OWNER/NAME" in fails("push", littered, "tiny", "--dry-run")


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
