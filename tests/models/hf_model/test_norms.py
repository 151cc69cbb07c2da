"""Norms of stock blocks by torch's kernel give what their own code gives, and others are left alone."""

import pytest
import tiny_sizes
import torch
from transformers import AutoModel, Gemma2Config, LlamaConfig, Qwen3Config

from sparsepack.models.hf_model.fused import norms_by_one_kernel

SIZE = {**tiny_sizes.SIZE, "head_dim": 16}
OF_LLAMA = ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize(
    ("config", "names"),
    [(LlamaConfig, OF_LLAMA), (Qwen3Config, ["self_attn.q_norm", "self_attn.k_norm", *OF_LLAMA]), (Gemma2Config, [])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_those_of_the_stock_code(config, names, dtype):
    with torch.device("meta"):
        block = AutoModel.from_config(config(**SIZE)).layers[0].requires_grad_(False)
    stock = [block.get_submodule(name).forward for name in names]
    assert norms_by_one_kernel(block) == names
    block.load_state_dict({name: torch.randn(value.shape) for name, value in block.state_dict().items()}, assign=True)
    block.to(dtype)
    for name, forward in zip(names, stock, strict=True):
        norm = block.get_submodule(name)
        assert norm.forward != forward
        x = 3 * torch.randn(2, 7, *norm.weight.shape).to(dtype)
        torch.testing.assert_close(norm(x), forward(x), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)


def test_a_norm_that_does_more_is_left_alone():
    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * torch.nn.functional.rms_norm(x, (8,), eps=self.variance_epsilon)

    block = torch.nn.ModuleDict({"norm": Shifted()})
    assert norms_by_one_kernel(block) == []
    assert "forward" not in vars(block["norm"])
