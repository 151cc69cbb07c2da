"""The entry point `vllm.general_plugins`: vLLM learns which class reads `quantization_config` of a folder of ours."""

from sparsepack.formats.containers.safetensors import METHOD


def register() -> None:
    """Called in every process of vLLM, perhaps several times. Imports nothing that vLLM has not imported by then, and
    makes no CUDA context."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from sparsepack.integration.vllm.config import FolderVllmConfig

    register_quantization_config(METHOD)(FolderVllmConfig)
