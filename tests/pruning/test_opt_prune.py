"""OPT is pruned as other families are: matrices with names of its own, and their biases."""

import pytest
import torch
from models_for_tests import OPT, TEXT, make_opt
from transformers import AutoModelForCausalLM

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.permute import permuted_block
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.pattern import Pattern, grouped


def test_a_block_in_another_order_computes_the_same(tmp_path):
    checkpoint = open_checkpoint(make_opt(tmp_path / "m"))
    stream = BlockStream(checkpoint)
    stream.load(1)
    x = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(0))
    expected, generator = stream(x), torch.Generator().manual_seed(1)
    before = {name: value.clone() for name, value in stream.block.state_dict().items()}
    neurons = torch.randperm(256, generator=generator)
    channels = torch.stack([torch.randperm(32, generator=generator) for _ in range(4)])
    stream.replace(permuted_block(before, checkpoint.family, neurons, channels, 4))
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "self_attn.v_proj.bias", "self_attn.out_proj.weight"):
        assert not torch.equal(stream.block.state_dict()[name], before[name])
    torch.testing.assert_close(stream(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
@pytest.mark.parametrize("name", ["opt", "opt, odd sizes"])
def test_a_pruned_model_is_one_of_the_stock_library_with_the_pattern_in_every_matrix(name, method, tmp_path):
    checkpoint = open_checkpoint(make_opt(tmp_path / "m", **OPT[name]))
    text = Text("text", (TEXT[:6000],), "text")
    calibrate(checkpoint, text, tmp_path / "c", CalibrateOptions(context=48, samples=8))
    read = None if method == "magnitude" else tmp_path / "c"
    made = prune(checkpoint, tmp_path / "p", PruneOptions(keep=2, of=4, method=method), read)
    found = open_checkpoint(tmp_path / "p")
    assert {row.matrix for row in made.matrices} == {
        f"model.decoder.layers.{layer}.{projection}"
        for layer in range(3)
        for site in SITES
        for projection in checkpoint.family.projections[site]
    }
    for row in made.matrices:
        groups = grouped(found.tensor(f"{row.matrix}.weight"), Pattern(2, 4))
        assert int((groups != 0).sum(-1).max()) <= 2
    for kept in ("model.decoder.embed_positions.weight", "model.decoder.layers.0.fc2.bias"):
        assert torch.equal(found.tensor(kept), checkpoint.tensor(kept))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32)
    assert torch.isfinite(stock(torch.arange(20)[None]).logits).all()
