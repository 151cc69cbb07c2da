"""What vLLM asks about a folder of ours: which of its layers are stored in a format of ours, and how."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.containers.safetensors import MANIFEST, METHOD
from sparsepack.formats.linear_folder import configured_format, configured_linears
from sparsepack.formats.orders.slide import Slide
from sparsepack.formats.slide import value_type
from sparsepack.progress import say

_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "a LoRA adapter (--enable-lora)": lambda config: config.lora_config is not None,
    "speculative decoding (--speculative-config)": lambda config: config.speculative_config is not None,
    "weights in the host's memory (--cpu-offload-gb, --offload-group-size)": lambda config: (
        config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size > 0
    ),
}
"""What vLLM may be asked to do and nobody has tried with such weights, and how its configuration says so."""


class FolderVllmConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of a folder, as `integration.transformers.quantizer.FolderConfig` describes it.

    Raises `ArtifactError` for a format that is unknown, and for what this version does not understand.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        super().__init__()
        self.format, self.attention = configured_format(section.get("format", "")), section.get("attention", False)
        self.linears = configured_linears(section)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FolderVllmConfig":
        """Read the section of config.json."""
        return cls(config)

    def get_name(self) -> str:
        """The name that `quant_method` of config.json has."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The types of inputs that the operator takes."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The first GPUs that multiply 2:4 structures are Ampere's; FP8, which needs Ada, is refused when it is
        prepared."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """config.json has it all."""
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Some models have other names in vLLM than in the folder."""
        self.linears = hf_to_vllm_mapper.apply_dict(self.linears)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """vLLM calls this once, before it starts other processes: the bytes of the folder are compared with their
        hashes. Raises `ArtifactError` as `integration.transformers.intact.manifest_of_intact`."""
        if self.attention:
            say(f"{model_name}: attention is dense in vLLM; sparsepack's own engines and transformers read a part")
        if Path(model_name).is_dir():
            _check_bytes(model_name, tuple(self.linears.items()))
        else:
            say(f"{model_name}: not compared with its hashes; to have that, download it and serve the folder")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How vLLM runs a layer; None for layers that are no Linears.

        prefix -- the layer's name; of layers that vLLM has made one, the name of that one

        Raises `ArtifactError` for Linears that were pruned differently and that vLLM multiplies as one, `UserError` for
        what is asked of vLLM beside and was never tried.
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from sparsepack.integration.vllm.linear_method import Sparse24LinearMethod
        from sparsepack.integration.vllm.planes_method import PlanesLinearMethod

        how = self._how(prefix)
        if not isinstance(layer, LinearBase):
            if how is not None:
                raise ArtifactError(f"{prefix}: {_in_words(how)}, but no Linear in vLLM ({type(layer).__name__})")
            return None
        if how is None:
            return UnquantizedLinearMethod()
        running = get_current_vllm_config_or_none()
        for what, asked in _REFUSED.items():
            if running is not None and asked(running):
                raise UserError(f"{what}: not supported with {self.format.name} ({prefix}); leave it out")
        if not isinstance(how, Slide):
            return PlanesLinearMethod()
        tokens = 1 if running is None else running.scheduler_config.max_num_batched_tokens
        return Sparse24LinearMethod(how, value_type(self.format), tokens)

    def _how(self, prefix: str) -> Any | None:
        if prefix in self.linears:  # fused in the folder, too
            return self.linears[prefix]
        before, dot, last = prefix.rpartition(".")
        parts = [before + dot + part for part in self.packed_modules_mapping.get(last, [last])]
        ways = {part: self.linears.get(part) for part in parts}
        if len(set(ways.values())) > 1:
            said = ", ".join(f"{part} {_in_words(how)}" for part, how in ways.items())
            remedy = "prune them alike" if self.format.weight_sparsity else "pack the model again"
            raise ArtifactError(
                f"{prefix}: vLLM multiplies {len(parts)} Linears as one, and they differ: {said}; {remedy}"
            )
        return ways[parts[0]]


def _in_words(how: Any | None) -> str:
    """How a Linear is stored."""
    return "dense" if how is None else f"{how.pattern}" if isinstance(how, Slide) else "planes"


@cache
def _check_bytes(model: str, linears: tuple[tuple[str, Any], ...]) -> None:
    """Once a process, since vLLM may read a configuration several times."""
    from sparsepack.integration.transformers.quantizer import manifest_of_intact

    files = sorted(Path(model).glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{model}: no .safetensors files; expected a folder that was packed, with its {MANIFEST}")
    manifest_of_intact(files, model, dict(linears))
