"""Opening what `pack` wrote, a file or a folder: the one way to it for whoever inspects, verifies or runs it."""

from importlib import import_module
from pathlib import Path
from typing import Any

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.containers.gguf import is_ours, open_gguf
from sparsepack.formats.containers.safetensors import CONFIG, MANIFEST, METHOD, open_folder
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.table import FORMATS


def open_artifact(path: Path) -> Artifact:
    """Open what `pack` wrote, a file or a folder; raises `ArtifactError` where it is not that, damaged or too new."""
    path = Path(path)
    container: Any
    if is_checkpoint_folder(path):
        packed = f"{path.resolve().name}.gguf"
        raise ArtifactError(
            f"{path}: a checkpoint, which is not packed yet; pack it first: sparsepack pack {path} -o {packed}"
        )
    if path.is_dir():
        container, manifest = open_folder(path)
    else:
        container, manifest = open_gguf(path)
    format = FORMATS[manifest["kind"]]
    if format.folder != path.is_dir():
        raise ArtifactError(f"{path}: its manifest says {format.name}, which is a {format.container}; pack it again")
    artifact: Artifact = import_module(format.module).opened(container, manifest)
    return artifact


def read_packed(path: Path, verify: bool = True) -> PackedModel:
    """Open an artifact as what an engine runs. Matrices stay in the mapped file.

    The header is always checked against its hash; the tensors too unless `verify` is False.
    Raises `ArtifactError` where it is damaged, of a format that no engine runs, newer than this program, or
    inconsistent.
    """
    artifact = open_artifact(path)
    if artifact.format.runs and verify:
        artifact.check_bytes()
    return artifact.packed()


def check_readable(path: Path, output: Path) -> None:
    """Open what was just written, before it gets its name `output`, as those do who run or evaluate it.

    Raises `PackingError` where that is refused: a number of the model is none that its readers take.
    """
    try:
        artifact = open_artifact(path)
        artifact.check_shapes()
        if artifact.format.runs:
            artifact.packed()
        artifact.stock()
    except ArtifactError as error:
        reason = str(error).removeprefix(f"{path}: ").rpartition("; pack")[0] or str(error)
        raise PackingError(
            f"{output}: not written, since nothing could open it: {reason}; correct this in the model's files"
        ) from error


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder holds a model as others write it, by its names and by what its config.json says alone."""
    try:
        named = f'"quant_method": "{METHOD}"'.encode()
        ours = (path / MANIFEST).exists() or named in (path / CONFIG).read_bytes()
    except (OSError, ValueError):  # whoever reads it says what is wrong with it
        return False
    return not ours


def is_artifact(path: Path) -> bool:
    """Whether `pack` wrote a file or a folder, by its names and keys alone."""
    if path.is_dir():
        return (path / MANIFEST).is_file()
    return path.is_file() and path.suffix == ".gguf" and is_ours(path)
