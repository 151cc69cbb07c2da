"""Masks for whole texts are stock code's, which looks at nothing on the GPU for them and is left as it was after."""

from functools import partial

import pytest
import torch
from model_variants import FOLDERS
from models_for_tests import VOCABULARY
from transformers import masking_utils

from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_config import by_length, rotary_settings
from sparsepack.models.hf_model.attention import masks_of_whole_texts
from sparsepack.models.hf_model.blocks import BlockStream

IDS = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))


def fails(*_, **__):
    raise AssertionError("asked")


def through_the_first_block(folder, device: str = "cpu") -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What leaves the block, and the masks that its attention got."""
    stream, masks = BlockStream(open_checkpoint(folder), device), []
    stream.load(0)
    stream.block.self_attn.register_forward_pre_hook(
        lambda _, __, options: masks.append(options["attention_mask"]), with_kwargs=True
    )
    with torch.inference_mode():
        return stream(stream.embed(IDS)), masks


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_asked_of_positions(folders, monkeypatch, name):
    """Not while a run is recorded, either: a causal mask is left to attention then, too."""
    expected, masks = through_the_first_block(folders(name))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", fails)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    found, others = through_the_first_block(folders(name))
    assert torch.equal(found, expected)
    assert [mask is None for mask in others] == [mask is None for mask in masks]
    assert masking_utils.find_packed_sequence_indices is fails


def test_who_comes_first_may_leave_first(monkeypatch):
    monkeypatch.setattr(masking_utils, "is_tracing", fails)
    one, other = masks_of_whole_texts(), masks_of_whole_texts()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert masking_utils.is_tracing() is False
    other.__exit__(None, None, None)
    assert masking_utils.is_tracing is fails


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOLDERS)
def test_a_gpu_is_not_waited_for_within_a_block_and_a_recorded_run_gives_the_same(folders, name):
    from sparsepack.runtime.cuda.driver.device import Recorder

    checkpoint = open_checkpoint(folders(name))
    if any(by_length(of) for of in rotary_settings(checkpoint.config)):
        pytest.skip("stock code looks at the text's length, which is on the GPU; such a run is not recorded")
    stream = BlockStream(checkpoint, "cuda", torch.bfloat16)
    with torch.inference_mode():
        hidden = stream.embed(IDS).cuda()
        for layer in range(checkpoint.layers):
            stream.load(layer)
            stream.ahead.wait()  # whoever reads the next block waits for the GPU
            expected = stream(hidden)
            torch.cuda.set_sync_debug_mode("error")
            try:
                stream(hidden)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            repeat, found = Recorder(stream.device)(partial(stream, hidden))
            repeat()
            assert torch.equal(found, expected)
