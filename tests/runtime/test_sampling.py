"""Choosing tokens: what may be chosen, how often, and that it repeats."""

import pytest
import torch
from commands_for_tests import sparsepack

from sparsepack.errors import ArtifactError, UserError
from sparsepack.runtime.generation.sampling import LEAST_LOGPROB, Sampler, Sampling, penalised

LOGITS = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05]).log()


def draws(sampling: Sampling, count: int = 2000, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(logits) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    assert set(draws(Sampling(), 10)) == {0}
    assert draws(Sampling(), 1, torch.tensor([1.0, 3.0, 3.0])) == [1]


def test_draws_follow_the_probabilities() -> None:
    found = torch.tensor(draws(Sampling(temperature=1.0))).bincount(minlength=5) / 2000
    assert (found - LOGITS.exp()).abs().max() < 0.04


def test_temperature_sharpens_and_flattens() -> None:
    cold, hot = (draws(Sampling(temperature=t)).count(0) for t in (0.3, 5.0))
    assert cold > 1800
    assert hot < 700


def test_top_k_keeps_the_likeliest() -> None:
    assert set(draws(Sampling(temperature=1.0, top_k=3))) == {0, 1, 3}
    assert set(draws(Sampling(temperature=1.0, top_k=1))) == {0}
    assert set(draws(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {0}), (0.45, {0}), (0.6, {0, 1}), (0.8, {0, 1, 3}), (1.0, {*range(5)})]
)
def test_top_p_keeps_the_fewest_that_have_the_probability(top_p: float, kept: set[int]) -> None:
    assert set(draws(Sampling(temperature=1.0, top_p=top_p))) == kept


def test_top_p_is_a_share_of_what_top_k_kept() -> None:
    assert set(draws(Sampling(temperature=1.0, top_k=2, top_p=0.7))) == {0}


@pytest.mark.parametrize("field", ["top_k", "repeat_last_n"])
def test_a_count_that_kernels_cannot_hold_is_refused(field: str) -> None:
    with pytest.raises(UserError, match="2147483647"):
        Sampling(**{field: 2**63})
    asked = sparsepack("generate", "m.gguf", "--prompt", "x", f"--{field.replace('_', '-')}", 2**63)
    assert asked.exit_code == 2
    assert "2147483647" in asked.stderr


def test_a_seed_repeats_and_another_differs() -> None:
    assert draws(Sampling(1.0, seed=5), 50) == draws(Sampling(1.0, seed=5), 50)
    assert draws(Sampling(1.0, seed=5), 50) != draws(Sampling(1.0, seed=6), 50)


def test_impossible_tokens_are_never_chosen() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), -1.0])
    assert set(draws(Sampling(temperature=3.0), 500, logits)) == {1, 3}


def test_tiny_temperatures_are_greedy() -> None:
    assert set(draws(Sampling(temperature=1e-300), 20)) == {0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(ArtifactError, match="damaged"):
        Sampler(Sampling()).choose(torch.tensor([0.0, bad]))


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}],
    ids=str,
)
def test_options_out_of_range_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="expected"):
        Sampling(**options)  # type: ignore[arg-type]


# the repeat penalty


def test_the_repeat_penalty_is_llama_cpps() -> None:
    import ctypes

    import llama_cpp

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator) * 4
    for last_n, penalty in ((64, 1.3), (5, 1.7), (3, 0.8), (0, 2.0)):
        before = torch.randint(50, (12,), generator=generator).tolist()
        theirs = llama_cpp.llama_sampler_init_penalties(50, last_n, penalty, 0.0, 0.0)
        for id in before:
            llama_cpp.llama_sampler_accept(theirs, id)
        data = (llama_cpp.llama_token_data * 50)(*[(id, logit, 0.0) for id, logit in enumerate(logits.tolist())])
        array = llama_cpp.llama_token_data_array(data, 50, -1, False)
        llama_cpp.llama_sampler_apply(theirs, ctypes.byref(array))
        expected = torch.tensor([entry.logit for entry in sorted(data, key=lambda entry: entry.id)])
        llama_cpp.llama_sampler_free(theirs)
        found = penalised(logits.double(), before[len(before) - min(last_n, 12) :], penalty)
        torch.testing.assert_close(found.float(), expected)


def test_what_was_there_is_less_likely_the_prompt_and_the_choices_alike() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, -1.0])
    sampling = Sampling(repeat_penalty=1.5)
    sampler = Sampler(sampling, [0])
    assert [sampler.choose(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert Sampler(Sampling(repeat_penalty=1.5, repeat_last_n=0), [0]).choose(logits) == 0
    short = Sampler(Sampling(repeat_penalty=1.5, repeat_last_n=1), [0])
    assert [short.choose(logits) for _ in range(4)] == [1, 0, 1, 0]
    assert Sampler(Sampling(repeat_penalty=1.5, repeat_last_n=-1), [0, *[3] * 500]).choose(logits) == 1
    assert logits.tolist() == torch.tensor([2.0, 1.9, 1.8, -1.0]).tolist()


@pytest.mark.parametrize("penalty", [5e-324, 1e-308, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_of_any_size_leaves_a_choice(penalty: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, repeat_penalty=penalty)
    for logits in (torch.tensor([900.0, 800.0, -700.0]), torch.tensor([-900.0, -800.0, -700.0])):
        assert Sampler(sampling, [0, 1, 2]).choose(logits) in range(3)


def test_it_is_an_error_of_the_weights_with_a_penalty_too() -> None:
    with pytest.raises(ArtifactError, match="largest logit"):
        Sampler(Sampling(repeat_penalty=2.0), [0]).choose(torch.tensor([float("nan"), 1.0]))


# min-p, frequency and presence penalty, bias


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, {*range(5)}), (0.15, {0, 1, 2, 3}), (0.35, {0, 1}), (1.0, {0})])
def test_min_p_keeps_what_is_at_least_that_share_as_likely_as_the_likeliest(min_p: float, kept: set[int]) -> None:
    assert set(draws(Sampling(temperature=1.0, min_p=min_p))) == kept


def test_min_p_is_taken_after_the_temperature_and_beside_top_k_and_top_p() -> None:
    assert set(draws(Sampling(temperature=10.0, min_p=0.35))) == {*range(5)}
    assert set(draws(Sampling(temperature=1.0, min_p=0.15, top_k=2))) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, min_p=0.15, top_p=0.45))) == {0}
    assert set(draws(Sampling(temperature=1.0, min_p=0.35, top_p=0.99))) == {0, 1}


def test_a_token_loses_the_frequency_penalty_each_time_and_the_presence_penalty_once_that_it_was_chosen() -> None:
    logits = torch.tensor([3.0, 2.5, 0.0])
    frequent = Sampler(Sampling(frequency_penalty=0.4), [0, 0, 0])
    assert [frequent.choose(logits) for _ in range(5)] == [0, 0, 1, 0, 1], "the prompt does not count"
    present = Sampler(Sampling(presence_penalty=1.0), [0])
    assert [present.choose(logits) for _ in range(4)] == [0, 1, 0, 0]
    encouraged = Sampler(Sampling(presence_penalty=-1.0))
    assert [encouraged.choose(torch.tensor([1.0, 0.9])) for _ in range(2)] == [0, 0]


def test_a_bias_is_added_to_the_logit() -> None:
    assert draws(Sampling(logit_bias=((4, 100.0),)), 1) == [4]
    assert 0 not in draws(Sampling(temperature=1.0, logit_bias=((0, -100.0),)), 200)


@pytest.mark.parametrize("options", [{"min_p": 1.1}, {"min_p": -0.1}, {"frequency_penalty": float("nan")}], ids=str)
def test_their_values_out_of_range_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="expected"):
        Sampling(**options)  # type: ignore[arg-type]


# logprobs and constraints


def test_logprobs_are_the_model_s_whatever_changes_the_choice() -> None:
    how = Sampling(logprobs=2, logit_bias=((4, 100.0),), temperature=0.0, repeat_penalty=3.0)
    sampler = Sampler(how, [0, 1])
    assert sampler.choose(LOGITS) == 4
    (told,) = sampler.taken_logprobs()
    assert (told.id, told.logprob) == (4, pytest.approx(LOGITS[4].item()))
    assert told.top == ((0, pytest.approx(LOGITS[0].item())), (1, pytest.approx(LOGITS[1].item())))
    assert sampler.taken_logprobs() == ()


def test_logprobs_of_no_others_and_of_impossible_tokens() -> None:
    sampler = Sampler(Sampling(logprobs=0))
    sampler.choose(LOGITS)
    assert sampler.taken_logprobs()[0].top == ()
    sampler = Sampler(Sampling(logprobs=9))
    sampler.choose(torch.tensor([0.0, float("-inf")]))
    assert sampler.taken_logprobs()[0].top == ((0, 0.0), (1, LEAST_LOGPROB))


class Alternating:
    """Even and odd tokens in turn."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> torch.Tensor:
        return torch.arange(5) % 2 == len(self.taken) % 2

    def take(self, id: int) -> None:
        self.taken.append(id)


def test_only_tokens_that_a_constraint_allows_are_chosen_and_each_text_has_its_own() -> None:
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, constraint=Alternating)
        for _ in range(2):
            sampler = Sampler(sampling)
            assert [sampler.choose(LOGITS) % 2 for _ in range(6)] == [0, 1] * 3
    logits = torch.tensor([float("-inf")] * 4 + [1.0])
    sampler = Sampler(Sampling(constraint=Alternating))
    assert [sampler.choose(logits) for _ in range(2)] == [4, 1], "an impossible token where nothing else is allowed"


class Failing(Alternating):
    def take(self, id: int) -> None:
        raise UserError("the grammar cannot be followed")


def test_a_constraint_that_fails_tells_so_when_asked_and_not_where_other_texts_would_fail_too() -> None:
    sampler = Sampler(Sampling(constraint=Failing))
    sampler.check()
    assert sampler.choose(LOGITS) == 0
    with pytest.raises(UserError, match="cannot be followed"):
        sampler.check()


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"frequency_penalty": 1.0},
        {"presence_penalty": -1.0},
        {"logprobs": 0},
        {"constraint": Alternating},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_devices_do_not_know_is_chosen_on_the_host(options: dict[str, object]) -> None:
    assert Sampling(**options).on_host  # type: ignore[arg-type]
    assert not Sampling(temperature=1.0, top_k=4, top_p=0.9).on_host
