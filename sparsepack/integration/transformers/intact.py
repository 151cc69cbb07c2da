"""A slid folder is found intact before transformers reads a tensor of it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from sparsepack.errors import ArtifactError
from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.containers.safetensors.container import open_folder
from sparsepack.formats.containers.safetensors.layout import MANIFEST, unsealed
from sparsepack.formats.manifest import read_manifest
from sparsepack.formats.slid.artifact import SlidArtifact
from sparsepack.progress import say

VERIFY = "SPARSEPACK_VERIFY"
"""The environment variable that leaves the check out where it is 0."""


def manifest_of_intact(
    files: Sequence[Path], model: str, slides: Mapping[str, Slide]
) -> tuple[Path, dict[str, Any]] | None:
    """The place and the content of the manifest of a folder whose every byte has its hash; None where none is there.

    files  -- those of which transformers will read the tensors
    model  -- the folder or repository that was asked for
    slides -- how each Linear was slid, by the configuration that transformers has read

    stderr has a line where nothing says whether the bytes are intact, or `SPARSEPACK_VERIFY` is 0. Raises
    `ArtifactError` for a file of tensors outside of the folder, damage, values that are NaN or infinite, and files that
    transformers would read although the manifest does not list them.
    """
    folder = _folder_of(files, model)
    place = _manifest_beside(files[0], folder, model)
    if place is None:
        say(
            f"{model}: {MANIFEST} is missing, as after save_pretrained, so nothing says whether its bytes are intact; "
            "load the folder that was packed"
        )
        return None
    if os.environ.get(VERIFY) == "0":
        say(f"{model}: loaded without a look at its hashes, as {VERIFY} is 0")
        return place, read_manifest(unsealed(place).get("manifest"), f"{place}: the manifest")
    opened, manifest = open_folder(place.parent, whole=_snapshot_of(files[0]) is None)
    artifact = SlidArtifact(manifest, opened)
    artifact.check_shapes()
    if artifact.slides != slides:
        raise ArtifactError(f"{model}: the configuration has other patterns than {folder}; load one folder alone")
    if other := sorted({file.name for file in files} - set(opened.raw)):
        raise ArtifactError(f"{model}: {other[0][:100]!r} holds none of the tensors that were packed; load those alone")
    opened.check_tensors()
    return place, manifest


def _folder_of(files: Sequence[Path], model: str) -> Path:
    """The one folder, of the model's, in which all files of tensors lie: an index may name any file of the system."""
    folder, asked = files[0].parent, Path(model)
    for file in files:
        within = file.is_relative_to(asked) if asked.is_dir() else _snapshot_of(file) is not None
        parts = file.relative_to(asked).parts if within and asked.is_dir() else file.parts
        if not within or ".." in parts or file.parent != folder or not file.is_file():
            raise ArtifactError(
                f"{model}: the file of tensors {str(file)[:200]!r} is missing or lies outside of the folder; pack the "
                "model again"
            )
    return folder


def _snapshot_of(file: Path) -> Path | None:
    """The folder of a commit in a hub's cache that holds a file; None where it lies elsewhere."""
    return next((folder for folder in file.parents if folder.parent.name == "snapshots"), None)


def _manifest_beside(file: Path, folder: Path, model: str) -> Path | None:
    """The manifest that belongs to a file of tensors in `folder`; None where there is none.

    Of a repository's cache, whose files come one by one, the path of the tensors tells what transformers does not pass
    on: commit, subfolder and cache. The token it does not tell: a private repository needs the one of `hf auth login`
    or HF_TOKEN.
    """
    snapshot = _snapshot_of(file)
    if Path(model).is_dir() or snapshot is None:
        place = folder / MANIFEST
        return place if os.path.lexists(place) else None
    found = cached_file(
        model,
        MANIFEST,
        revision=snapshot.name,
        subfolder="/".join(folder.relative_to(snapshot).parts),
        cache_dir=snapshot.parents[2],  # CACHE/models--OWNER--NAME/snapshots/COMMIT
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
