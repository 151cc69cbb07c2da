"""An artifact and its model card to a repository of the Hugging Face hub, in one commit."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.verify import verify
from sparsepack.progress import say
from sparsepack.publish.card import MARK, model_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CARD = "README.md"


def push(
    path: Path,
    repository: str,
    results: Sequence[Path] = (),
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Upload an artifact whose every byte was checked first; returns the address of the commit.

    repository -- OWNER/NAME; created, private if so wished, where there is none
    results    -- for the card, as `card.model_card` takes them
    revision   -- branch, which must exist (default: the repository's main one)

    A README.md there that sparsepack did not write is kept. Raises `ArtifactError` for a damaged artifact, `UserError`
    where the hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    report = verify(path)
    if not report.passed:
        raise ArtifactError(f"{path}: not uploaded, since {report.problems[0]}")
    card = model_card(path, results)
    api = HfApi()
    refused: tuple[type[Exception], ...] = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError)
    refused += tuple(_network_errors())
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        base = path.parent if path.is_file() else path
        adds = [CommitOperationAdd(file.relative_to(base).as_posix(), file) for file in files]
        adds = [add for add in adds if add.path_in_repo != _CARD]
        if _ours(api, repository, revision):
            adds.append(CommitOperationAdd(_CARD, card.encode()))
        else:
            say(f"{repository}: its {_CARD} was not made by sparsepack and is kept; `sparsepack card` prints ours")
        commit = api.create_commit(repository, adds, commit_message=message or f"Add {path.name}", revision=revision)
    except refused as error:
        raise UserError(
            f"{repository}: the hub refuses or cannot be reached ({_first_line(error)}); {_remedy()}"
        ) from error
    return str(commit.commit_url)


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


def _remedy() -> str:
    return "log in with `hf auth login`, and look at the repository's name, your rights and HF_HUB_OFFLINE"
