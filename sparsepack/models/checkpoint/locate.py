"""Where a checkpoint is that is asked for by name - a model that ships, a folder, a file, or what the hub has - and
which files of a folder hold its weights."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

from sparsepack.data import SHIPPED_MODELS
from sparsepack.errors import CheckpointError
from sparsepack.files.stored import Name, Stored, shown, validate
from sparsepack.files.tensors import INDEX, WEIGHTS
from sparsepack.option import is_missing_path
from sparsepack.progress import say


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


class _Index(Stored):
    weight_map: dict[str, Name]


_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
BESIDE_WEIGHTS = ("consolidated*", "adapter_*", "optimizer*", "training_args*")
"""Files of these names hold something else than a model as transformers stores it: its maker's own format, what was
trained beside it, the state of a training."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, as transformers chooses them: model.safetensors, else the shards of
    the index, else those that are named as shards, else whatever there is. Raises `CheckpointError`."""
    single, index = folder / WEIGHTS, folder / INDEX
    if _is_there(single):
        if index.is_file():
            say(f"{folder}: {WEIGHTS} is read, as transformers does; {INDEX} beside it is not")
        return [single]
    if index.is_file():
        names = indexed(folder)
        if missing := [name[:200] for name in names if not _is_there(folder / name)]:
            raise CheckpointError(f"{folder}: the shard {missing[0]} of {INDEX} is missing; download it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if shards := [file for file in files if _SHARD.fullmatch(file.name)]:
        numbers = [_SHARD.fullmatch(file.name) for file in shards]
        for number in range(1, max(int(each[2]) for each in numbers if each) + 1):
            if number not in {int(each[1]) for each in numbers if each}:
                raise CheckpointError(f"{folder}: shard {number} of the model is missing; download it again")
        return shards
    model = [file for file in files if not any(fnmatch(file.name, pattern) for pattern in BESIDE_WEIGHTS)]
    if not model:
        pickles = any([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
        found = files[0].name if files else "pickled weights (.bin, .pth), which are not read" if pickles else "none"
        raise CheckpointError(
            f"{folder}: no .safetensors file of a model; found {found}; expected model.safetensors: load the model "
            "with transformers and write it with save_pretrained"
        )
    return model


def indexed(folder: Path) -> list[str]:
    """The names of the shards of a folder's index. Raises `CheckpointError`."""
    index = folder / INDEX
    try:
        names = sorted(set(validate(_Index, json.loads(index.read_text(encoding="utf-8"))).weight_map.values()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a shard index ({shown(error)}); download it again") from error
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(
                f"{index}: the shard {name[:200]!r} lies outside of the folder; expected names of files in it"
            )
    return names


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is longer than any file's
        return False
