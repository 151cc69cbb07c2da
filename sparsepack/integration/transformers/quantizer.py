"""The quantizer that transformers calls to load a slid folder: `from_pretrained` finds it by `quant_method`.

It checks the folder's hashes, then puts a `Sparse24Linear` in the place of each Linear that was slid.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsepack.errors import ArtifactError
from sparsepack.formats.attention import sparse_attention_of
from sparsepack.formats.containers.safetensors import MANIFEST, METHOD, open_folder, unsealed
from sparsepack.formats.manifest import read_manifest
from sparsepack.formats.orders.slide import STEPS, Slide
from sparsepack.formats.slide import Sparse24Artifact, configured_slides, configured_type
from sparsepack.progress import say
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import dense_type, prepare, sparse24_linear

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
    artifact = Sparse24Artifact(manifest, contents)
    artifact.check_shapes()
    if artifact.slides != slides:
        raise ArtifactError(f"{model}: the configuration has other patterns than {folder}; load one folder alone")
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


class Sparse24Linear(nn.Module):
    """y = x W^T + bias, with W as it lies in a slid folder (`formats.slide`).

    weight           -- the sparse24 values: int8, float8_e4m3fn or bfloat16 [rows, stored]
    weight_positions -- uint8 [rows, stored / 4 rounded up]
    weight_scale     -- float32 [rows]; None for bfloat16
    bias             -- [rows], or None

    Inputs [..., columns] are quantised token by token to the values' type, outputs have the inputs' type. See
    `runtime.sparse24_operator`, which computes it and has no gradients.
    """

    def __init__(
        self, columns: int, rows: int, how: Slide, dtype: torch.dtype, bias: bool, of: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.how = columns, rows, how
        stored = how.stored(columns)

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = parameter(rows, stored, dtype=dtype)
        self.weight_positions = parameter(rows, -(-stored // 4), dtype=torch.uint8)
        self.weight_scale = parameter(rows, dtype=torch.float32) if dtype in STEPS else None
        self.bias = parameter(rows, dtype=of) if bias else None
        self._prepared_for: Any = None
        self._prepared: list[Tensor] = []
        self._matrix: Sparse24Matrix | None = None

    @classmethod
    def in_place_of(cls, linear: nn.Linear, how: Slide, dtype: torch.dtype) -> "Sparse24Linear":
        """One of the same shape, bias and device, without weights yet."""
        weight, bias = linear.weight, linear.bias is not None
        return cls(linear.in_features, linear.out_features, how, dtype, bias, weight.dtype, weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "Sparse24Linear":
        """Weights and scales move, but are never cast: their types are the format's."""
        self._forget()

        def moved(t: Tensor) -> Tensor:
            found: Tensor = fn(t) if t is self.bias else fn(t.view(torch.uint8)).view(t.dtype)
            return found

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *given: Any, **settings: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*given, **settings)

    def __getstate__(self) -> dict[str, Any]:
        # A copy's weights lie elsewhere.
        return {**self.__dict__, "_prepared_for": None, "_prepared": [], "_matrix": None}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.how.pattern}, {self.weight.dtype}"

    @property
    def matrix(self) -> Sparse24Matrix:
        """The weights as the operations take them."""
        return Sparse24Matrix(self.weight, self.weight_positions, self.weight_scale, self.how, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"inputs {list(x.shape)}; expected [..., {self.in_features}]")
        self._prepare(x.dtype, x.device)
        assert self._matrix is not None
        return sparse24_linear(x, self._matrix, self.bias, self._prepared)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _prepare(self, dtype: torch.dtype, device: torch.device) -> bool:
        """The weights are prepared when the first inputs come, and again once they lie elsewhere. Compilers call it
        while they compile; from then on they watch what `_prepared` is. Raises `ValueError` for another device."""
        # Not self.weight: modules find that in Python, four times as slowly, and this is done for every token.
        weight, positions = self._parameters["weight"], self._parameters["weight_positions"]
        assert weight is not None
        assert positions is not None
        lies = (dtype, device, weight.data_ptr(), positions.data_ptr())
        if self._prepared_for != lies:
            if device != weight.device:
                raise ValueError(f"inputs on {device}, weights on {weight.device}; move one of them")
            self._forget()  # its memory is free before more is taken
            self._matrix = self.matrix
            self._prepared = prepare(self._matrix, dtype)
            self._prepared_for = lies
        return True

    def _forget(self) -> None:
        self._prepared_for, self._prepared, self._matrix = None, [], None


@register_quantization_config(METHOD)
class Sparse24Config(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a slid folder.

    format    -- the format's name
    patterns  -- the name of each slid Linear -> [keep, of]
    attention -- whether the folder's manifest has sparse attention; False in folders from before this was said

    Raises `ArtifactError` for a format that is none of these, or patterns that mean nothing.
    """

    def __init__(self, format: str = "", patterns: Any = None, attention: bool = False, **more: Any) -> None:
        self.quant_method = METHOD
        self.format, self.patterns, self.attention = format, patterns, attention
        configured_type(format)  # unknown ones are refused

    @property
    def slides(self) -> dict[str, Slide]:
        """How each Linear was slid."""
        return configured_slides(self.patterns)


@register_quantizer(METHOD)
class Sparse24Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `Sparse24Linear` in the place of each Linear that was slid, before the weights are read, once they are found
    intact."""

    requires_calibration = True
    quantization_config: Sparse24Config
    _manifest: tuple[Path, dict[str, Any]] | None = None
    """The place and the content of the folder's manifest, where it has one."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        slides = self.quantization_config.slides
        if checkpoint_files:
            files = [Path(file) for file in checkpoint_files]
            self._manifest = manifest_of_intact(files, str(model.name_or_path), slides)
        dtype = configured_type(self.quantization_config.format).dtype
        for name, how in slides.items():
            try:
                linear = model.get_submodule(name)
            except AttributeError as error:
                raise ArtifactError(f"{name}: no such Linear in this model; pack it again") from error
            if not isinstance(linear, torch.nn.Linear):
                raise ArtifactError(f"{name}: a {type(linear).__name__}, expected a Linear; pack the model again")
            model.set_submodule(name, Sparse24Linear.in_place_of(linear, how, dtype))

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Attaches what the folder says of sparse attention, or says on stderr why the model runs dense."""
        linears = [module for module in model.modules() if isinstance(module, Sparse24Linear)]
        if linears and (device := linears[0].weight.device.type) in ("cpu", "mps"):
            dtype = dense_type(linears[0].matrix, model.dtype)
            taken = sum(of.in_features * of.out_features for of in linears) * dtype.itemsize
            say(
                f"{model.name_or_path}: on {device} its {len(linears)} slid Linears are multiplied with their zeros, "
                f"in {str(dtype).removeprefix('torch.')}: {taken / 1e9:.2f} GB more from the first product on"
            )
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
