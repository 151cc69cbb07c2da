"""METIS: who is active together, the graph of it, and parts that are made equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.simulation.metis import active_together, metis_order, repaired, strongest
from sparsepack.tracing.trace import Trace, ids_file, layer_file, packed_bits, packed_ids, save


def written(path, traced: Trace, sessions: list[np.ndarray]) -> Trace:
    """A trace of one block in which sessions, bool [tokens, neurons], are active."""
    files = [
        (name, data)
        for number, active in enumerate(sessions)
        for name, data in (
            (ids_file(number), packed_ids(np.arange(len(active)))),
            (layer_file(number, 0), packed_bits(active)),
        )
    ]
    rows = [{"document": 0, "tokens": len(active), "prompt": 1, "text": 0} for active in sessions]
    model = {**traced.manifest["model"], "layers": 1}
    manifest = {**traced.manifest, "model": model, "intermediate": sessions[0].shape[1], "sessions": rows}
    return save({key: value for key, value in manifest.items() if key != "files"}, files, path)


def symmetric(random: np.random.Generator, neurons: int) -> np.ndarray:
    """Counts of a block, many of them alike."""
    half = np.triu(random.integers(0, 5, (neurons, neurons)), 1).astype(np.float32)
    return half + half.T


def test_tokens_that_have_two_neurons_active_are_counted(traced, monkeypatch):
    monkeypatch.setattr("sparsepack.simulation.metis._TOKENS", 7)  # 48 tokens are several pieces, and one is shorter
    together = active_together(traced, 1)
    active = np.concatenate([traced.active(session, 1) for session in range(3)])
    assert together[3, 5] == np.count_nonzero(active[:, 3] & active[:, 5])
    expected = active.T.astype(int) @ active.astype(int)
    np.fill_diagonal(expected, 0)
    assert (together == expected).all()


def test_edges_lead_to_the_strongest_and_back():
    together = np.zeros((5, 5), np.float32)
    for one, other, weight in ((0, 1, 9), (0, 2, 3), (0, 3, 8), (1, 3, 1)):
        together[one, other] = together[other, one] = weight
    starts, targets, weights = strongest(together, 1)
    assert starts.tolist() == [0, 3, 4, 5, 6, 6]  # all of 0's were chosen by the others; 4 is never active with another
    assert targets.tolist() == [1, 2, 3, 0, 0, 0]
    assert weights.tolist() == [9, 3, 8, 9, 3, 8]


@given(st.integers(0, 2**32 - 1), st.integers(2, 30), st.integers(1, 12))
def test_a_graph_has_every_edge_in_both_directions_and_at_least_the_strongest(seed, neurons, edges):
    together = symmetric(np.random.default_rng(seed), neurons)
    starts, targets, weights = strongest(together, edges)
    found = np.zeros_like(together)
    for neuron in range(neurons):
        mine = slice(starts[neuron], starts[neuron + 1])
        found[neuron, targets[mine]] = weights[mine]
    assert (found == found.T).all()
    assert ((found == 0) | (found == together)).all()
    for neuron in range(neurons):
        positive = np.count_nonzero(together[neuron])
        assert np.count_nonzero(found[neuron]) >= min(edges, positive)
        left_out = together[neuron][found[neuron] == 0]
        kept = np.sort(found[neuron])[::-1][: min(edges, positive)]
        assert not kept.size or left_out.max(initial=0) <= kept[-1]


@given(st.data(), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_repaired_parts_are_equal_with_as_few_changes_as_there_can_be(data, parts, size, seed):
    neurons = parts * size
    part = np.array(data.draw(st.lists(st.integers(0, parts - 1), min_size=neurons, max_size=neurons)))
    before = part.copy()
    found = repaired(part, symmetric(np.random.default_rng(seed), neurons), size)
    assert (part == before).all()
    assert (np.bincount(found, minlength=parts) == size).all()
    too_many = np.maximum(np.bincount(part, minlength=parts) - size, 0).sum()
    assert np.count_nonzero(found != part) == too_many


def test_who_is_least_with_a_part_leaves_it_for_the_one_it_is_most_with():
    together = np.zeros((6, 6), np.float32)
    for one, other, weight in ((0, 1, 9), (1, 2, 5), (2, 3, 1), (0, 2, 3), (2, 4, 2), (4, 5, 7)):
        together[one, other] = together[other, one] = weight
    assert repaired(np.array([0, 0, 0, 1, 2, 2]), together, 2).tolist() == [0, 0, 1, 1, 2, 2]
    assert repaired(np.array([0, 0, 0, 0, 2, 2]), together, 2).tolist() == [0, 0, 1, 1, 2, 2]
    assert repaired(np.array([0, 0, 0, 0, 0, 2]), together, 2).tolist() == [0, 0, 1, 1, 2, 2]


def test_neurons_that_are_always_active_together_are_one_group(traced, tmp_path):
    pytest.importorskip("pymetis")
    random = np.random.default_rng(1)
    home = random.permutation(np.repeat(np.arange(6), 4))
    sessions = [random.random((200, 6)) < 0.3 for _ in range(2)]
    made = written(tmp_path / "t", traced, [groups[:, home] for groups in sessions])
    order = metis_order(made, 4).reshape(6, 4)
    assert all(len(set(home[group])) == 1 for group in order)


def test_a_block_whose_neurons_are_never_active_has_groups_too(traced, tmp_path):
    pytest.importorskip("pymetis")
    made = written(tmp_path / "t", traced, [np.zeros((20, 24), np.bool_)])
    assert sorted(metis_order(made, 4).ravel()) == list(range(24))
    assert sorted(metis_order(made, 24).ravel()) == list(range(24))
