"""The quantizer that transformers calls to load a folder of ours: `from_pretrained` finds it by `quant_method`.

It checks the folder's hashes, then puts a `FolderLinear` in the place of each Linear that is stored in a way of ours.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsepack.errors import ArtifactError
from sparsepack.formats.attention import sparse_attention_of
from sparsepack.formats.containers.safetensors import MANIFEST, METHOD, open_folder, unsealed
from sparsepack.formats.linear_folder import configured_format, configured_linears, open_linears
from sparsepack.formats.manifest import read_manifest
from sparsepack.integration.transformers.linears import FolderLinear, linear_of
from sparsepack.progress import say

VERIFY = "SPARSEPACK_VERIFY"
"""The environment variable that leaves the check out where it is 0."""


def manifest_of_intact(
    files: Sequence[Path], model: str, linears: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]] | None:
    """The place and the content of the manifest of a folder whose every byte has its hash; None where none is there.

    files   -- those of which transformers will read the tensors
    model   -- the folder or repository that was asked for
    linears -- how each Linear is stored, by the configuration that transformers has read

    stderr has a line where nothing says whether the bytes are intact, or `SPARSEPACK_VERIFY` is 0. Raises
    `ArtifactError` for a file of tensors outside of the folder, damage, values that are NaN or infinite, and files that
    transformers would read although the manifest does not list them.
    """
    folder = _folder_of(files, model)
    place = _find_manifest(files[0], folder, model)
    if place is None:
        say(
            f"{model}: {MANIFEST} is missing, as after save_pretrained, so nothing says whether its bytes are intact; "
            "load the folder that was packed"
        )
        return None
    if os.environ.get(VERIFY) == "0":
        say(f"{model}: loaded without a look at its hashes, as {VERIFY} is 0")
        return place, read_manifest(unsealed(place).get("manifest"), f"{place}: the manifest")
    contents, manifest = open_folder(place.parent, whole=_snapshot_of(files[0]) is None)
    artifact = open_linears(contents, manifest)
    if artifact.linears != linears:
        raise ArtifactError(f"{model}: the configuration has other Linears than {folder}; load one folder alone")
    if other := sorted({file.name for file in files} - set(contents.raw)):
        raise ArtifactError(f"{model}: {other[0][:100]!r} holds none of the tensors that were packed; load those alone")
    contents.check_tensors()
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


def _find_manifest(file: Path, folder: Path, model: str) -> Path | None:
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


@register_quantization_config(METHOD)
class FolderConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a folder with Linears in a format of ours.

    format    -- the format's name
    attention -- whether the folder's manifest has sparse attention; False in folders from before this was said
    section   -- what else the format says (`linear_folder.configured_linears`)

    Raises `ArtifactError` for a format that is unknown.
    """

    def __init__(self, format: str = "", attention: bool = False, **section: Any) -> None:
        configured_format(format)
        self.__dict__.update(section, quant_method=METHOD, format=format, attention=attention)

    @property
    def linears(self) -> dict[str, Any]:
        """How each Linear is stored, by its name. Raises `ArtifactError` for what is not understood."""
        return configured_linears(self.__dict__)


@register_quantizer(METHOD)
class FolderQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts a `FolderLinear` in the place of each Linear that is stored in a way of ours, before the weights are read,
    once they are found intact."""

    requires_calibration = True
    quantization_config: FolderConfig
    _manifest: tuple[Path, dict[str, Any]] | None = None
    """The place and the content of the folder's manifest, where it has one."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        format, linears = configured_format(self.quantization_config.format), self.quantization_config.linears
        if checkpoint_files:
            files = [Path(file) for file in checkpoint_files]
            self._manifest = manifest_of_intact(files, str(model.name_or_path), linears)
        for name, how in linears.items():
            try:
                linear = model.get_submodule(name)
            except AttributeError as error:
                raise ArtifactError(f"{name}: no such Linear in this model; pack it again") from error
            if not isinstance(linear, torch.nn.Linear):
                raise ArtifactError(f"{name}: a {type(linear).__name__}, expected a Linear; pack the model again")
            model.set_submodule(name, linear_of(format, linear, how))

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Attaches what the folder says of sparse attention, or says on stderr why the model runs dense."""
        linears = [module for module in model.modules() if isinstance(module, FolderLinear)]
        if linears and (words := linears[0].in_words(linears, model.dtype)):
            say(f"{model.name_or_path}: {words}")
        found, self._manifest = self._manifest, None
        if found is None:  # saved by transformers, which keeps the tensors alone
            if self.quantization_config.attention:
                say(
                    f"{model.name_or_path}: attention is dense: {MANIFEST}, which says how it is sparse, is missing; "
                    "load the folder that was packed"
                )
            return
        place, manifest = found
        attention = sparse_attention_of(manifest, model.config, place)
        if attention is None:
            return
        # Not above: transformers is still being imported when this file is.
        from sparsepack.integration.transformers.double_sparsity import NAME, attach

        asked = model.config._attn_implementation
        if asked in ("sdpa", NAME):  # sdpa is the default, and looks the same where it was asked for
            attach(model, attention)
        else:
            say(f"{model.name_or_path}: attention is dense, as attn_implementation {asked!r} is; leave that out")

    def param_needs_quantization(self, model: Any, param_name: str, **settings: Any) -> bool:
        """No parameter needs it: what is read is quantised already."""
        return False

    def is_serializable(self, *given: Any, **settings: Any) -> bool:
        """The tensors are those of the folder."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Values of 8 bits have no gradient."""
        return False
