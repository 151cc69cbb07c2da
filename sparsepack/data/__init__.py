"""What the quickstart needs and every installation has: tiny trained models and their texts."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

TINY_MODEL = Path(__file__).parent / "tiny"
"""A Llama of 2 M parameters trained by tools/train_tiny_model.py."""
TINY_MIXTURE = Path(__file__).parent / "tiny-mixture"
"""A Qwen3-MoE of 2 M parameters, 16 experts a block, trained by tools/train_tiny_mixture.py."""

SHIPPED_MODELS: Mapping[str, Path] = MappingProxyType(
    {"shipped:tiny": TINY_MODEL, "shipped:tiny-mixture": TINY_MIXTURE}
)
"""By their names on the command line."""
PROMPTS = Path(__file__).parent / "prompts.json"
"""Questions and openings from which a model writes text to be calibrated on."""
