"""The quantizer that transformers calls to load a slid folder: `from_pretrained` finds it by `quant_method`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.formats.attention import sparse_attention_of
from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.containers.safetensors.layout import MANIFEST, METHOD, unsealed
from sparsepack.formats.manifest import read_manifest
from sparsepack.formats.slid.layout import slid_formats
from sparsepack.integration.transformers.slid_linear import SlidLinear
from sparsepack.models.records.pattern import Pattern
from sparsepack.progress import say


@register_quantization_config(METHOD)
class SlidConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a slid folder.

    format    -- the format's name
    patterns  -- the name of each slid Linear -> [keep, of]
    attention -- whether the folder's manifest has sparse attention; False in folders from before this was said

    Raises `ArtifactError` for a format that is none of these, or patterns that mean nothing.
    """

    def __init__(self, format: str = "", patterns: Any = None, attention: bool = False, **more: Any) -> None:
        self.quant_method = METHOD
        self.format, self.patterns, self.attention = format, patterns, attention
        known = slid_formats()
        if not isinstance(format, str) or format not in known:
            raise ArtifactError(
                f"format {str(format)[:60]!r}: transformers loads {', '.join(known)}; update sparsepack"
            )

    @property
    def slides(self) -> dict[str, Slide]:
        """How each Linear was slid."""
        try:
            return {name: Slide(Pattern(keep, of)) for name, (keep, of) in self.patterns.items()}
        except (TypeError, ValueError, AttributeError, PackingError) as error:
            raise ArtifactError(
                f"quantization_config.patterns: not understood ({error}); pack the model again"
            ) from error


@register_quantizer(METHOD)
class SlidQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `SlidLinear` in the place of each Linear that was slid, before the weights are read."""

    requires_calibration = True
    quantization_config: SlidConfig
    _tensors: Path | None = None
    """The path is that of the first file of tensors."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        self._tensors = Path(checkpoint_files[0]) if checkpoint_files else None
        dtype = slid_formats()[self.quantization_config.format].dtype
        for name, how in self.quantization_config.slides.items():
            try:
                linear = model.get_submodule(name)
            except AttributeError as error:
                raise ArtifactError(f"{name}: no such Linear in this model; pack it again") from error
            if not isinstance(linear, torch.nn.Linear):
                raise ArtifactError(f"{name}: a {type(linear).__name__}, expected a Linear; pack the model again")
            model.set_submodule(name, SlidLinear.in_place_of(linear, how, dtype))

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Attaches what the folder says of sparse attention, or says on stderr why the model runs dense."""
        place = None if self._tensors is None else _manifest_beside(self._tensors, model.name_or_path)
        if place is None:  # saved by transformers, which keeps the tensors alone
            if self.quantization_config.attention:
                say(
                    f"{model.name_or_path}: attention is dense: {MANIFEST}, which says how it is sparse, is missing; "
                    "load the folder that was packed"
                )
            return
        manifest = read_manifest(unsealed(place).get("manifest"), f"{place}: the manifest")
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


def _manifest_beside(tensors: Path, model: str) -> Path | None:
    """The manifest that belongs to a file of tensors; None where there is none.

    model -- the folder or repository that was asked for. Of a repository's cache, whose files come one by one, the
    path of the tensors tells what transformers does not pass on: commit, subfolder and cache. The token it does not
    tell: a private repository needs the one of `hf auth login` or HF_TOKEN.
    """
    snapshot = next((folder for folder in tensors.parents if folder.parent.name == "snapshots"), None)
    if Path(model).is_dir() or snapshot is None:
        place = tensors.parent / MANIFEST
        return place if place.is_file() else None
    found = cached_file(
        model,
        MANIFEST,
        revision=snapshot.name,
        subfolder="/".join(tensors.relative_to(snapshot).parts[:-1]),
        cache_dir=snapshot.parents[2],  # CACHE/models--OWNER--NAME/snapshots/COMMIT
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
