"""A checkpoint that is asked for by name is a model that ships, a folder, a file, or what the hub has."""

from pathlib import Path

from sparsepack.data import SHIPPED_MODELS
from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import INDEX, WEIGHTS
from sparsepack.models.checkpoint.sources import BESIDE_WEIGHTS, indexed
from sparsepack.option import is_missing_path


def located(name: str) -> Path:
    """The folder or the GGUF file of a checkpoint; a hub id is downloaded. Raises `CheckpointError`."""
    if name in SHIPPED_MODELS:
        return SHIPPED_MODELS[name]
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{name}: no config.json in this folder; expected a Hugging Face model folder")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{name}: expected a model folder, a .gguf file or a hub id")
        return path
    if is_missing_path(name, ".gguf"):
        raise CheckpointError(f"{name}: no such model folder or file; expected one, or the name of a model on the hub")
    return _downloaded(name)


def _downloaded(name: str) -> Path:
    """The folder of a hub id: what describes the model, then the weights that `weight_files` chooses, and no other."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "tokenizer.model", "merges.txt"]))
        commit = folder.name  # another one may be the newest by now
        snapshot_download(name, revision=commit, allow_patterns=[WEIGHTS])
        if not (folder / WEIGHTS).is_file():
            shards = indexed(folder) if (folder / INDEX).is_file() else ["*.safetensors"]
            snapshot_download(name, revision=commit, allow_patterns=shards, ignore_patterns=[*BESIDE_WEIGHTS])
        return folder
    except CheckpointError:
        raise
    except Exception as error:  # offline, unknown, gated: many kinds, one meaning
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{name}: neither a local model folder nor a hub model that can be reached ({reason})"
        ) from error
