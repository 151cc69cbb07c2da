"""An artifact and its model card to a repository of the Hugging Face hub, in one commit."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.open import open_artifact
from sparsepack.formats.verify import verify
from sparsepack.progress import say
from sparsepack.publish.card import MARK, model_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    """What goes up to a repository: the files of an artifact that was checked, and its card.

    files -- name in the repository -> the file here
    card  -- the text of README.md there
    left  -- how many other files lie in the artifact's folder; they stay where they are
    """

    repository: str
    files: dict[str, Path]
    card: str
    left: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The size of every file, the card's included, by its name in the repository."""
        sizes = {name: file.stat().st_size for name, file in self.files.items()}
        return {**sizes, _CARD: len(self.card.encode())}


def planned_upload(path: Path, repository: str, results: Sequence[Path] = ()) -> Upload:
    """What `push` would upload. The hub is not asked.

    Raises `UserError` for a name that no repository can have, and as `card.model_card` does; `ArtifactError` for a
    damaged artifact, and where one of its files is a link.
    """
    _check_name(repository)
    report = verify(path)
    if not report.passed:
        raise ArtifactError(f"{path}: not uploaded, since {report.problems[0]}")
    files = {file.name: file for file in open_artifact(path).files if file.name != _CARD}
    left = 0
    if path.is_dir():
        for file in files.values():
            if file.is_symlink():
                raise ArtifactError(
                    f"{file}: not uploaded, since it is a link, which may lead anywhere; put the file itself there"
                )
        left = sum(entry.name not in (*files, _CARD) for entry in path.iterdir())
    return Upload(repository, files, model_card(path, results), left)


def push(
    path: Path,
    repository: str,
    results: Sequence[Path] = (),
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Upload an artifact whose every byte was checked first, and nothing else; returns the address of the commit.

    repository -- OWNER/NAME; created, private if so wished, where there is none
    results    -- for the card, as `card.model_card` takes them
    revision   -- branch, which must exist (default: the repository's main one)

    A README.md there that sparsepack did not write is kept. Raises as `planned_upload` does, and `UserError` where the
    hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    upload = planned_upload(path, repository, results)
    if upload.left:
        say(f"{path}: {upload.left} other files or folders in it are none of the artifact and stay here")
    message = message or f"Add {path.resolve().name}"
    api = HfApi()
    # A ValueError is of a name that no file of a repository can have.
    refused: tuple[type[Exception], ...] = (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    )
    refused += tuple(_network_errors())
    try:
        adds = [CommitOperationAdd(name, file) for name, file in upload.files.items()]
        api.create_repo(repository, private=private, exist_ok=True)
        if _ours(api, repository, revision):
            adds.append(CommitOperationAdd(_CARD, upload.card.encode()))
        else:
            say(f"{repository}: its {_CARD} was not made by sparsepack and is kept; `sparsepack card` prints ours")
        commit = api.create_commit(repository, adds, commit_message=message, revision=revision)
    except refused as error:
        raise UserError(
            f"{repository}: the hub refuses or cannot be reached ({_first_line(error)}); log in with "
            "`hf auth login`, and look at the repository's name, your rights and HF_HUB_OFFLINE"
        ) from error
    return str(commit.commit_url)


def _check_name(repository: str) -> None:
    """Raise `UserError` unless a repository can have the name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        if repository.count("/") != 1:
            raise HFValidationError("it has no owner" if "/" not in repository else "it has more than two parts")
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(
            f"{repository}: no name of a repository ({_first_line(error)}); expected OWNER/NAME, as in me/tiny-zigzag"
        ) from error


def _ours(api: "HfApi", repository: str, revision: str | None) -> bool:
    """Whether the card there may be replaced: it is one of ours, or there is none."""
    if not api.file_exists(repository, _CARD, revision=revision):
        return True
    from huggingface_hub import hf_hub_download

    return MARK.encode() in Path(hf_hub_download(repository, _CARD, revision=revision)).read_bytes()


def _network_errors() -> Iterator[type[Exception]]:
    """What huggingface_hub lets through of the library that it talks to the network with: one or the other, by its
    version."""
    for library in ("httpx", "httpx2"):
        with suppress(ImportError):
            yield import_module(library).HTTPError


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
