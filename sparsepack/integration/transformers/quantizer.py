"""The quantizer that transformers calls to load a slid folder: `from_pretrained` finds it by `quant_method`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsepack.errors import ArtifactError
from sparsepack.formats.attention import sparse_attention_of
from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.containers.safetensors.layout import MANIFEST, METHOD
from sparsepack.formats.slid.artifact import configured_slides, configured_type
from sparsepack.integration.transformers.intact import manifest_of_intact
from sparsepack.integration.transformers.slid_linear import SlidLinear
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
        configured_type(format)  # unknown ones are refused

    @property
    def slides(self) -> dict[str, Slide]:
        """How each Linear was slid."""
        return configured_slides(self.patterns)


@register_quantizer(METHOD)
class SlidQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `SlidLinear` in the place of each Linear that was slid, before the weights are read, once they are found
    intact."""

    requires_calibration = True
    quantization_config: SlidConfig
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
            model.set_submodule(name, SlidLinear.in_place_of(linear, how, dtype))

    def _process_model_after_weight_loading(self, model: Any, **settings: Any) -> None:
        """Attaches what the folder says of sparse attention, or says on stderr why the model runs dense."""
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
