"""Run a model block by block: one decoder block of the stock transformers model in memory at a time.

The forward pass is transformers' own: a backbone with a single layer, into which each block's weights are loaded
in turn, so masks, rotary embeddings and sliding windows are never re-implemented here.
"""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sparsepack.models.attention import Watcher, watched_attention
from sparsepack.models.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint


class BlockStream:
    """Holds one decoder block of a checkpoint on a device.

    `load(i)` replaces the block in memory, `modules` gives its submodules to hook, calling it runs the block:
    hidden [B, S, H] -> [B, S, H]. `embed` and `head` load what they need and let it go again.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint = checkpoint
        self.device, self.dtype = torch.device(device), dtype
        self._backbones: dict[str, Any] = {}
        self._backbone: Any = None

    def load(self, layer: int) -> None:
        """Read block `layer` from disk; the block before it is let go."""
        kinds = getattr(self.checkpoint.config, "layer_types", None)
        kind = kinds[layer] if kinds else "only"
        if kind not in self._backbones:
            self._backbones[kind] = self._single_layer(kinds and [kind])
        self._backbone = self._backbones[kind]
        tensors = {name: value.to(self.device, self.dtype) for name, value in self.checkpoint.block(layer).items()}
        self._backbone.layers[0].load_state_dict(tensors, strict=True, assign=True)

    @property
    def block(self) -> nn.Module:
        """The decoder block in memory."""
        module = self._backbone.layers[0]
        assert isinstance(module, nn.Module)
        return module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the loaded block on hidden states [B, S, H]."""
        output = self._backbone(inputs_embeds=hidden.to(self.device, self.dtype), use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def watched(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Within the context, the loaded block's attention shows its queries and keys to `watcher`."""
        return watched_attention(self._backbone, watcher)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] -> hidden states [B, S, H]."""
        table = self.checkpoint.tensor(EMBEDDING)
        return nn.functional.embedding(ids.cpu(), table).to(self.device, self.dtype)

    def head(self) -> nn.Module:
        """Final norm and output matrix as one module: hidden [..., H] -> logits [..., V]."""
        from transformers import AutoModel

        with torch.device("meta"):
            norm = AutoModel.from_config(self._config(None)).norm
        norm.weight = nn.Parameter(self.checkpoint.tensor(FINAL_NORM), requires_grad=False)
        weight = self.checkpoint.tensor(HEAD)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return nn.Sequential(norm, linear).to(self.device, self.dtype)

    def _config(self, layer_types: list[str] | None) -> Any:
        config = copy.deepcopy(self.checkpoint.config)
        config.num_hidden_layers = 1
        config.dtype = self.dtype
        if layer_types:
            config.layer_types = layer_types
        return config

    def _single_layer(self, layer_types: list[str] | None) -> Any:
        from transformers import AutoModel

        config = self._config(layer_types)
        with torch.device("meta"):
            backbone = AutoModel.from_config(config, attn_implementation="sdpa")
        backbone.embed_tokens = nn.Identity()
        backbone.norm = nn.Identity()
        # Its frequencies are computed, not loaded: made again off the meta device.
        backbone.rotary_emb = type(backbone.rotary_emb)(config).to(self.device)
        return backbone.eval().requires_grad_(False)
