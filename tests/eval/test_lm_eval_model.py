"""A scorer as lm-eval's model: the right numbers, and the right positions sparse."""

import copy
from types import SimpleNamespace

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.eval.lm_eval_model import SparseLM

CONTEXT = 48  # of the `scorer` fixture


class Dictation:
    """Always continues a prompt of `prompt` tokens with the given text."""

    device = torch.device("cpu")
    context = 512

    def __init__(self, ids, prompt):
        self.ids, self.prompt = ids, prompt

    def logits(self, input_ids, lengths, sparse_from, scored_from=None):
        logits = torch.zeros(*input_ids.shape, 259)
        for position in range(self.prompt - 1, input_ids.shape[1]):
            logits[:, position, self.ids[min(position - self.prompt + 1, len(self.ids) - 1)]] = 1.0
        return logits


def lm(scorer, tokenizer, protocol="decode", batch_size=2):
    return SparseLM(scorer, tokenizer, protocol=protocol, batch_size=batch_size)


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


PAIRS = requests(("", "Hello"), ("The cat", " sat"), ("The cat", " ran off"), ("A", " b"), ("ab" * 60, " long one"))
ROLLING = requests(("short",), ("longer than one window " * 5,), ("",))


def direct(model, ids, scored):
    log_probs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return sum(log_probs[position - 1, ids[position]].item() for position in range(scored, len(ids)))


def test_loglikelihoods_equal_a_direct_computation(tiny_llama, scorer, byte_tokenizer):
    found = lm(scorer, byte_tokenizer).loglikelihood(PAIRS)
    for request, (value, _) in zip(PAIRS, found, strict=True):
        context, continuation = (byte_tokenizer.encode(text) for text in request.args)
        ids = ((context or [byte_tokenizer.bos_token_id]) + continuation)[-(CONTEXT + 1) :]
        assert value == pytest.approx(direct(tiny_llama, ids, len(ids) - len(continuation)), abs=1e-3)


def test_all_three_kinds_of_request_equal_those_of_lm_evals_own_model(tiny_llama, scorer, byte_tokenizer):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=tiny_llama, tokenizer=byte_tokenizer, batch_size=2, max_length=CONTEXT, device="cpu")
    ours = lm(scorer, byte_tokenizer, protocol="dense")
    expected = theirs.loglikelihood(PAIRS, disable_tqdm=True)
    assert [value for value, _ in ours.loglikelihood(PAIRS)] == pytest.approx([v for v, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in ours.loglikelihood(PAIRS)] == [greedy for _, greedy in expected]
    assert ours.loglikelihood_rolling(ROLLING) == pytest.approx(theirs.loglikelihood_rolling(ROLLING), abs=1e-3)
    options = {"until": ["e", "\n"], "max_gen_toks": 12}
    prompts = requests(("Once", options), ("upon a time", options), ("bc" * 40, options))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts, disable_tqdm=True)


@pytest.mark.parametrize(("protocol", "expected"), [("decode", [0, 6, 47 - 8]), ("all", [0, 0, 0]), ("dense", None)])
def test_the_protocol_says_from_which_position_a_row_is_sparse(scorer, byte_tokenizer, protocol, expected):
    rows = requests(("", "Hello"), ("The cat", " sat"), ("ab" * 60, " long one"))
    lm(scorer, byte_tokenizer, protocol, batch_size=1).loglikelihood(rows)
    by_length = sorted(scorer.calls, key=lambda call: int(call[1]))
    assert [int(length) for _, length, _ in by_length] == [5, 10, CONTEXT]
    # the position that predicts the first of 8 + 1 tokens, where the last token is never an input
    assert [int(start) for *_, start in by_length] == (expected or [5, 10, CONTEXT])


def test_a_generated_row_stays_dense_up_to_its_prompt(scorer, byte_tokenizer):
    lm(scorer, byte_tokenizer).generate_until(requests(("prompt", {"max_gen_toks": 5, "until": []})))
    assert [int(start) for *_, start in scorer.calls] == [5] * 5
    assert [int(length) for _, length, _ in scorer.calls] == [6, 7, 8, 9, 10]


def test_the_batch_size_changes_nothing(scorer, byte_tokenizer):
    sampled = [({"temperature": 0.7, "do_sample": True, "max_gen_toks": 6, "until": ["q"]})] * 3
    prompts = requests(*zip(("one", "and two", "three"), sampled, strict=True))
    alone, together = (lm(scorer, byte_tokenizer, batch_size=size) for size in (1, 16))
    values = [[value for value, _ in model.loglikelihood(PAIRS)] for model in (alone, together)]
    assert values[0] == pytest.approx(values[1], abs=1e-3)
    assert alone.loglikelihood_rolling(ROLLING) == pytest.approx(together.loglikelihood_rolling(ROLLING), abs=1e-3)
    assert alone.generate_until(prompts) == together.generate_until(prompts)


def test_the_longest_rows_are_run_first_so_that_too_little_memory_shows_at_once(scorer, byte_tokenizer):
    model = lm(scorer, byte_tokenizer, batch_size=1)
    model.generate_until(requests(*[(text, {"max_gen_toks": 1}) for text in ("abc", "abcde", "ab")]))
    model.loglikelihood(requests(("abc", "d"), ("abcde", "f"), ("ab", "c")))
    generated, scored = ([int(length) for _, length, _ in calls] for calls in (scorer.calls[:3], scorer.calls[3:]))
    assert generated == sorted(generated, reverse=True)
    assert scored == sorted(scored, reverse=True)
    assert len(set(generated)) == len(set(scored)) == 3


def test_choices_of_one_token_share_one_row(scorer, byte_tokenizer):
    lm(scorer, byte_tokenizer, batch_size=8).loglikelihood(
        requests(("Answer:", "A"), ("Answer:", "B"), ("Answer:", "C"))
    )
    assert [tuple(ids.shape) for ids, *_ in scorer.calls] == [(1, 7)]


def test_what_does_not_fit_is_cut_at_its_beginning_and_said(scorer, byte_tokenizer, caplog):
    model = lm(scorer, byte_tokenizer)
    model.loglikelihood(requests(("x" * 60, "tail"), ("y", "tail")))
    assert max(int(length) for _, lengths, _ in scorer.calls for length in lengths) == CONTEXT
    assert model.truncated_requests == 1
    assert "1 requests exceed the context of 48" in caplog.text
    with pytest.raises(UserError, match="continuation of 49 tokens exceeds the context of 48"):
        model.loglikelihood(requests(("x", "y" * 49)))


def test_outputs_that_are_not_numbers_are_not_scored_as_right(byte_tokenizer):
    broken = Dictation([5], 1)
    broken.logits = lambda input_ids, *_: torch.full((*input_ids.shape, 259), float("nan"))
    with pytest.raises(UserError, match="NaN"):
        lm(broken, byte_tokenizer).loglikelihood(requests(("a", "b")))


@pytest.mark.parametrize(
    ("text", "until", "answer"),
    [
        ("one two three", ["two"], "one "),  # begins and ends inside tokens of one byte: spans three
        ("one\n\ntwo", ["two", "\n\n"], "one"),  # the earliest in the text, not the first of the list
        ("Q: one", ["prompt"], "Q: one"),  # the context never counts
        ("yes<|turn|>no", ["<|turn|>"], "yes"),  # the text of a special token
        ("yes<|turn|>no", [], "yesno"),  # otherwise special tokens are not part of the answer
        ("stop", ["s"], ""),
        ("no end", ["", None], "no end"),  # nothing to stop at
    ],
)
def test_generation_ends_before_the_earliest_stop_string(byte_tokenizer, text, until, answer):
    ids = [*byte_tokenizer.encode(text), byte_tokenizer.eos_token_id]
    model = lm(Dictation(ids, len("prompt")), byte_tokenizer)
    assert model.generate_until(requests(("prompt", {"until": until}))) == [answer]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "do_sample": False},
        {"temperature": 0.0},
        {"do_sample": False, "until": ["e", "th", "\n"], "max_new_tokens": 8},
        {"repetition_penalty": 1.7, "num_beams": 1, "top_p": 1.0, "until": "a"},
        {"no_repeat_ngram_size": 2, "max_gen_toks": 6, "early_stopping": False},
        {"min_new_tokens": 3, "temperature": 0.0, "do_sample": False},
    ],
)
def test_greedy_arguments_mean_what_lm_evals_own_model_takes_them_for(tiny_llama, scorer, byte_tokenizer, options):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=tiny_llama, tokenizer=byte_tokenizer, batch_size=1, max_length=CONTEXT, device="cpu")
    asked = {"max_gen_toks": 12, **options} if "max_new_tokens" not in options else options
    prompts = requests(("Once", asked), ("upon a time", asked))
    expected = theirs.generate_until(copy.deepcopy(prompts), disable_tqdm=True)
    assert lm(scorer, byte_tokenizer, protocol="dense").generate_until(prompts) == expected


def test_any_of_several_end_tokens_ends_a_text(byte_tokenizer):
    ids = byte_tokenizer.encode("abXcd")
    model = SparseLM(Dictation(ids, 6), byte_tokenizer, protocol="dense", batch_size=1, end_tokens=[ids[2]])
    assert model.generate_until(requests(("prompt", {"until": []}))) == ["abX"]  # it is no special token
    assert model.generate_until(requests(("prompt", {"until": [], "eos_token_id": ids[3]}))) == ["abXc"]


@pytest.mark.parametrize("special", [False, True])
def test_given_end_tokens_take_the_place_of_the_models_as_in_lm_evals_own_model(
    tiny_llama, scorer, byte_tokenizer, special
):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=tiny_llama, tokenizer=byte_tokenizer, batch_size=1, max_length=CONTEXT, device="cpu")
    first = lm(scorer, byte_tokenizer, protocol="dense").generate_until(requests(("Once", {"max_gen_toks": 4})))[0]
    end = byte_tokenizer.eos_token_id if special else byte_tokenizer.encode(first[-1])[0]
    asked = requests(("Once", {"max_gen_toks": 12, "eos_token_id": [end], "until": []}))
    expected = theirs.generate_until(copy.deepcopy(asked), disable_tqdm=True)
    assert lm(scorer, byte_tokenizer, protocol="dense").generate_until(asked) == expected


def test_a_stop_that_is_no_text_is_one_line(byte_tokenizer):
    with pytest.raises(UserError, match="generation option until 5: expected text"):
        lm(Dictation([1], 0), byte_tokenizer).generate_until(requests(("prompt", {"until": 5})))


def test_a_length_counts_the_prompt(byte_tokenizer):
    model = lm(Dictation(byte_tokenizer.encode("abcdef"), 6), byte_tokenizer)
    assert model.generate_until(requests(("prompt", {"max_length": 9, "until": []}))) == ["abc"]


def test_sampling_takes_what_transformers_takes(byte_tokenizer):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.1, "max_gen_toks": 3}
    model = lm(Dictation(byte_tokenizer.encode("abcdef"), 6), byte_tokenizer)
    assert model.generate_until(requests(("prompt", options))) == ["abc"]
    with pytest.raises(UserError, match="generation option top_p 7"):
        model.generate_until(requests(("prompt", {**options, "top_p": 7})))


def test_generation_ends_at_the_token_limit_and_refuses_options_it_does_not_know(byte_tokenizer):
    model = lm(Dictation(byte_tokenizer.encode("abc" * 100), 6), byte_tokenizer)
    assert model.generate_until(requests(("prompt", {"max_gen_toks": 5, "top_p": 0.9}))) == ["abcab"]
    with pytest.raises(UserError, match="num_beams"):
        model.generate_until(requests(("prompt", {"num_beams": 4})))
    with pytest.raises(UserError, match="600 new tokens leave no room"):
        model.generate_until(requests(("prompt", {"max_gen_toks": 600})))


# chat templates

CHAT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def conversational(byte_tokenizer, template=CHAT):
    tokenizer = copy.copy(byte_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_conversations_are_what_the_template_makes_of_them(scorer, byte_tokenizer, caplog):
    model = lm(scorer, conversational(byte_tokenizer))
    asked = [{"role": "user", "content": "Q"}]
    assert model.apply_chat_template(asked) == "<user>Q\n<assistant>"
    begun = [*asked, {"role": "assistant", "content": "A"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == "<user>Q\n<assistant>A"
    assert model.apply_chat_template([{"role": "system", "content": "S"}, *asked]) == "<user>Q\n<assistant>"
    assert "system messages are left out" in caplog.text
    assert model.chat_template(True) == CHAT


def test_a_model_without_a_template_cannot_converse(scorer, byte_tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        lm(scorer, byte_tokenizer).chat_template()
    with pytest.raises(UserError, match="'rag'"):
        lm(scorer, conversational(byte_tokenizer)).chat_template("rag")
    with pytest.raises(UserError, match="cannot take this conversation"):
        lm(scorer, conversational(byte_tokenizer, "{{ 1 / 0 }}")).apply_chat_template(
            [{"role": "user", "content": "Q"}]
        )
