"""What transformers calls to load a slid folder: `from_pretrained` finds it by `quant_method: sparsepack`."""

from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsepack.artifacts.attention import sparse_attention_of
from sparsepack.artifacts.folder.layout import MANIFEST, METHOD, unsealed
from sparsepack.artifacts.manifest import read_manifest
from sparsepack.codecs.pattern import Pattern
from sparsepack.codecs.slide import Slide
from sparsepack.errors import ArtifactError, PackingError
from sparsepack.runtime.slide.linear import VALUES, SlidLinear


@register_quantization_config(METHOD)
class SlidConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a slid folder.

    format   -- the format's name
    patterns -- the name of each slid Linear -> [keep, of]

    Raises `ArtifactError` for a format that is none of these, or patterns that mean nothing.
    """

    def __init__(self, format: str = "", patterns: Any = None, **more: Any) -> None:
        self.quant_method = METHOD
        self.format, self.patterns = format, patterns
        if format not in VALUES:
            raise ArtifactError(f"format {format!r}: transformers loads {', '.join(VALUES)}; update sparsepack")

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

    def _process_model_before_weight_loading(self, model: Any, **settings: Any) -> None:
        dtype = VALUES[self.quantization_config.format]
        for name, how in self.quantization_config.slides.items():
            try:
                linear = model.get_submodule(name)
            except AttributeError as error:
                raise ArtifactError(f"{name}: no such Linear in this model; pack it again") from error
            if not isinstance(linear, torch.nn.Linear):
                raise ArtifactError(f"{name}: a {type(linear).__name__}, expected a Linear; pack the model again")
            model.set_submodule(name, SlidLinear.in_place_of(linear, how, dtype))

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Attaches what the folder says of sparse attention, unless an implementation other than sdpa was asked for."""
        revision = getattr(model.config, "_commit_hash", None)
        place = cached_file(
            model.name_or_path, MANIFEST, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if place is None:  # saved by transformers, which keeps the tensors alone
            return
        manifest = read_manifest(unsealed(Path(place)).get("manifest"), f"{place}: the manifest")
        attention = sparse_attention_of(manifest, model.config, place)
        if attention is not None and model.config._attn_implementation == "sdpa":
            # Not above: transformers is still being imported when this file is.
            from sparsepack.runtime.double.attention import attach

            attach(model, attention)

    def param_needs_quantization(self, model: Any, param_name: str, **settings: Any) -> bool:
        """None does: what is read is quantised already."""
        return False

    def is_serializable(self, *given: Any, **settings: Any) -> bool:
        """The tensors are those of the folder."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Values of 8 bits have no gradient."""
        return False
