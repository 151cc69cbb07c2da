"""Where a checkpoint or an artifact is that has a name - a model that ships, a folder, a file, or what the hub has -
and which files of a folder hold a checkpoint's weights."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from os.path import exists
from pathlib import Path

from sparsepack.data import SHIPPED_MODELS
from sparsepack.errors import ArtifactError, CheckpointError, UserError
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

    with _hub_errors(CheckpointError, f"{name}: neither a local model folder nor a hub model that can be reached"):
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "tokenizer.model", "merges.txt"]))
        commit = folder.name  # another one may be the newest by now
        snapshot_download(name, revision=commit, allow_patterns=[WEIGHTS])
        if not (folder / WEIGHTS).is_file():
            shards = indexed(folder) if (folder / INDEX).is_file() else ["*.safetensors"]
            snapshot_download(name, revision=commit, allow_patterns=shards, ignore_patterns=[*BESIDE_WEIGHTS])
    return folder


_HUB_ARTIFACT = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")


def located_artifact(name: str) -> Path:
    """The path of a packed GGUF by its own name or, where nothing is there, by that on the hub: OWNER/NAME, which has
    one GGUF, or OWNER/NAME:FILE, is downloaded. A path that cannot be a hub's name is left to whoever opens it. Raises
    `ArtifactError`."""
    on_hub = _HUB_ARTIFACT.fullmatch(name)
    if on_hub is None or exists(name) or is_missing_path(on_hub["repository"], ".gguf"):
        return Path(name)
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(ArtifactError, f"{name}: neither a file here nor one on the hub that can be reached"):
        repository, file = on_hub["repository"], on_hub["file"]
        if file is None:
            files = [each for each in HfApi().list_repo_files(repository) if each.endswith(".gguf")]
            if len(files) != 1:
                names = ", ".join(files[:10]) or "none"
                raise ArtifactError(
                    f"{name}: {len(files)} GGUFs on the hub ({names}); expected one, or {repository}:FILE"
                )
            (file,) = files
        return Path(hf_hub_download(repository, file))


@contextmanager
def _hub_errors(kind: type[UserError], message: str) -> Iterator[None]:
    """Raise one error for whatever goes wrong with the hub: offline, unknown, gated have one meaning."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or repr(error)).split("\n")[0]
        raise kind(f"{message} ({reason})") from error


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
