"""Block by block is the whole model in memory: the same bits, the same counts, and one block at a time."""

import weakref

import pytest
import torch
from models_for_tests import EVERY_FAMILY, OPT, VOCABULARY, WINDOWED, make_model, make_opt

from sparsepack.eval import scorer as module
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.scorer import SparseScorer, StreamedScorer
from sparsepack.eval.subject import open_subject
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.sites import SiteRule
from sparsepack.packing import PackRequest, pack

IDS = torch.randint(VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(3))
TARGETS = IDS.roll(-1, 1)


def made(folder, name):
    """A random checkpoint: of a family of `WINDOWED`, or one of `OPT`."""
    path = make_opt(folder / "m", **OPT[name]) if name in OPT else make_model(folder / "m", name, **WINDOWED[name])
    return open_checkpoint(path)


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def checkpoint(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("m"), request.param)


def rules_of(checkpoint):
    rules = {(layer, site): SiteRule(torch.tensor(0.4)) for layer in range(checkpoint.layers) for site in SITES}
    return rules | {(1, "attn_out"): SiteRule()}


def scorers_of(checkpoint):
    """The whole model in memory, and the same by blocks."""
    rules = rules_of(checkpoint)
    whole = SparseScorer(load_model(checkpoint), checkpoint.family, rules, 64)
    return whole, StreamedScorer(checkpoint, rules, 64)


@pytest.fixture(scope="module", params=[*WINDOWED, *OPT])
def scorers(request, tmp_path_factory):
    return scorers_of(made(tmp_path_factory.mktemp("s"), request.param))


@pytest.mark.parametrize(
    ("sparse_from", "batch"),
    [
        (0, 2),
        (12, None),
        (24, 1),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((0, None), (12, 1), (12, 2))),
    ],
)
def test_hidden_states_logits_and_counts_are_those_of_the_whole_model_bit_for_bit(scorers, sparse_from, batch):
    whole, blocks = scorers
    start = torch.full((5,), sparse_from)
    parts = torch.split(torch.arange(5), batch or 5)
    for scorer in scorers:
        scorer.reset()
    expected = torch.cat([whole.hidden(IDS[part], None, start[part]) for part in parts])
    found = blocks.hidden(IDS, None, start, batch)
    assert torch.equal(found, expected)
    assert blocks.realised() == whole.realised()
    assert bool(whole.realised()) == (sparse_from < 24)
    every = slice(None)
    assert torch.equal(blocks.head(every)(found), whole.head(every)(expected))
    words = [slice(at, at + 200) for at in range(0, VOCABULARY, 200)]
    parts = torch.cat([blocks.head(part)(found) for part in words], -1)
    torch.testing.assert_close(parts, whole.head(every)(expected), rtol=1e-5, atol=1e-5)


def test_padding_changes_no_real_position_and_is_not_counted(scorers):
    whole, blocks = scorers
    lengths = torch.tensor([24, 20, 7, 13, 1])
    for scorer in scorers:
        scorer.reset()
    found, expected = (each.hidden(IDS, lengths, torch.zeros(5, dtype=torch.int64)) for each in (blocks, whole))
    assert torch.equal(found, expected)
    assert blocks.realised() == whole.realised()


def test_one_block_waits_as_it_is_stored_and_one_is_held(checkpoint, monkeypatch):
    source, alive, most = type(checkpoint.source), [], []
    tensor, load = source.tensor, BlockStream.load

    def read(self, name):
        value = tensor(self, name)
        alive.append(weakref.ref(value))
        most.append(sum(ref() is not None for ref in alive))
        return value

    def loaded(self, layer):
        load(self, layer)
        blocks = [backbone.layers[0] for backbone in self._backbones.values()]
        assert sum(not next(block.parameters()).is_meta for block in blocks) == 1

    monkeypatch.setattr(source, "tensor", read)
    monkeypatch.setattr(BlockStream, "load", loaded)
    scorer = StreamedScorer(checkpoint, {}, 64)
    hidden = scorer.hidden(IDS, None, torch.full((5,), 24), 1)
    shapes, block = checkpoint.source.shapes, checkpoint.family.block
    sizes = [sum(name.startswith(f"{block(layer)}.") for name in shapes) for layer in range(checkpoint.layers)]
    assert max(most) <= max(sizes) + 1
    assert next(scorer._stream.block.parameters()).is_meta, "a block is still held when the logits are made"
    scorer.head(slice(0, 10))(hidden)
    scorer.head(slice(10, 20))(hidden)
    reads = len(most)
    norm = checkpoint.family.last_norm.removesuffix("weight")
    after = sum(name.startswith(norm) for name in shapes)
    names = checkpoint.family.per_layer
    inputs = 3 if names is not None and names.of(checkpoint.config) else 0
    assert reads == 1 + inputs + sum(sizes) + after + 1  # embedding, blocks' inputs, blocks, norm, output matrix


@pytest.mark.parametrize("protocol", ["dense", "decode", "all"])
def test_groups_of_windows_give_the_figures_of_the_whole_model(checkpoint, monkeypatch, protocol):
    """Two windows wait together, so the last group is smaller; the vocabulary comes in uneven parts."""
    monkeypatch.setattr(module, "HIDDEN_BYTES", 2 * 24 * checkpoint.config.hidden_size * 4)
    monkeypatch.setattr("sparsepack.eval.perplexity.WORDS", 200)
    monkeypatch.setattr("sparsepack.eval.perplexity.POSITIONS", 10)
    scorers = whole, blocks = scorers_of(checkpoint)
    assert (whole.rows_at_once(24, 1), blocks.rows_at_once(24, 1), blocks.rows_at_once(24, 4)) == (1, 2, 4)
    references = SparseScorer(whole.model, checkpoint.family, {}, 64), StreamedScorer(checkpoint, {}, 64)
    results = [
        score_windows(each, IDS, TARGETS, protocol, reference)
        for each, reference in zip(scorers, references, strict=True)
    ]
    for name in ("nll", "kl", "same_top", "reference_nll"):
        one, other = (getattr(result, name) for result in results)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert results[0].nll.dtype == torch.float64


def test_progress_counts_windows_once_whatever_the_steps(checkpoint, monkeypatch):
    shown = []

    class Bars:
        def __init__(self, label, total, **named):
            assert total == 5

        def __enter__(self):
            return shown.append

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("sparsepack.eval.perplexity.progress", Bars)
    score_windows(StreamedScorer(checkpoint, {}, 64), IDS, TARGETS, "dense", StreamedScorer(checkpoint, {}, 64))
    assert sum(shown) == 5
    assert len(shown) > 1, "a group of windows must show progress before it ends"


@pytest.mark.parametrize("kind", ["zigzag-q4_k", "q4_k", "bf16"])
def test_an_artifact_by_blocks_is_its_stock_model_bit_for_bit(checkpoint, tmp_path, kind):
    of_delta_net = checkpoint.architecture.delta_net  # llama.cpp has one size for heads of keys and of values
    unequal = of_delta_net is not None and of_delta_net.key_dim != of_delta_net.value_dim
    if (checkpoint.family.gguf is None or unequal) and kind != "zigzag-q4_k":
        pytest.skip("llama.cpp does not hold it")
    path = pack(PackRequest(checkpoint.name, tmp_path / "m.gguf", format=kind)).path
    subject = open_subject(str(path))
    none = torch.full((5,), 24)
    found, expected = (each.hidden(IDS, None, none) for each in (subject.scorer(), subject.task_scorer()))
    assert torch.equal(found, expected)
    every = slice(None)
    assert torch.equal(subject.scorer().head(every)(found), subject.task_scorer().head(every)(expected))
