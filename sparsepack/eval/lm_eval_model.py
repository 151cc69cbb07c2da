"""A sparse scorer as a model that lm-eval can ask."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import (
    EpsilonLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sparsepack.errors import UserError
from sparsepack.eval.protocols import Scorer
from sparsepack.files.hashing import fingerprint
from sparsepack.models.hf_config import token_ids
from sparsepack.models.tokenizer.chat import named_tokens, render_chat, template_of
from sparsepack.models.tokenizer.tokens import bos_tokens, check_ids, encode
from sparsepack.progress import progress
from sparsepack.workers.exchange import EACH_ALONE, Each

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_NEW_TOKENS = 256  # lm-eval's default for tasks that do not say
SAMPLING_SEED = 1234
_TOP_K = 50  # transformers' default, for sampling
_PENALTIES: dict[str, Callable[[Any], LogitsProcessor]] = {
    "repetition_penalty": lambda value: RepetitionPenaltyLogitsProcessor(float(value)),
    "no_repeat_ngram_size": lambda value: NoRepeatNGramLogitsProcessor(int(value)),
}
_WARPERS: dict[str, Callable[[Any], LogitsProcessor]] = {
    "temperature": lambda value: TemperatureLogitsWarper(float(value)),
    "top_k": lambda value: TopKLogitsWarper(int(value)),
    "top_p": lambda value: TopPLogitsWarper(float(value)),
    "min_p": lambda value: MinPLogitsWarper(float(value)),
    "typical_p": lambda value: TypicalLogitsWarper(float(value)),
    "epsilon_cutoff": lambda value: EpsilonLogitsWarper(float(value)),
}
"""What changes logits, in the order of transformers' `generate`; the second ones only where tokens are sampled."""
_NEUTRAL: dict[str, Any] = {
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0},
    **{"epsilon_cutoff": 0.0, "num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1},
}
"""With these values they do nothing."""
_WITHOUT_EFFECT = ("use_cache", "early_stopping", "length_penalty", "pad_token_id")  # of speed, beams and batches


@dataclass(frozen=True, order=True)
class ScoredRow:
    """One input of the model; `scored` is its first position whose output counts."""

    ids: tuple[int, ...]
    scored: int

    @property
    def context(self) -> tuple[int, ...]:
        """What lies before the first scored position."""
        return self.ids[: self.scored]


@dataclass(frozen=True)
class GenerationArguments:
    """How to continue a text.

    max_length -- of a text and its continuation, in tokens; None: only `max_new` counts
    min_new    -- before so many new tokens no text ends by a token
    ends       -- tokens that end it in place of the model's own; none: these
    changes    -- of the logits, names and values of `_PENALTIES` and `_WARPERS`
    """

    until: tuple[str, ...]
    max_new: int
    sample: bool
    max_length: int | None = None
    min_new: int = 0
    ends: frozenset[int] = frozenset()
    changes: tuple[tuple[str, float], ...] = ()

    def processors(self) -> LogitsProcessorList:
        """What changes logits, in order. Raises `UserError` for a value that transformers refuses."""
        processors = LogitsProcessorList()
        for name, value in self.changes:
            try:
                processors.append((_PENALTIES | _WARPERS)[name](value))
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"generation option {name} {value}: {error}; correct the task's generation_kwargs"
                ) from error
        return processors


class SparseLM(TemplateLM):
    """lm-eval's view of a `Scorer`, under one protocol (which positions of a row run sparse):

    - `decode`: from the position that predicts the first scored or generated token on; the context is dense. After
      an empty context that position is the prefix token itself, so the whole row is sparse.
    - `all`: every position.
    - `dense`: none.

    The prefix token is BOS where the tokenizer has one, else EOS. Special tokens at the start of a context are the
    tokenizer's own choice, as in lm-eval's HFLM. Rows too long for the scorer lose their beginning; they are counted
    in `truncated_requests` and warned about. `vocabulary` is how many tokens the model has; None: that is not checked.

    lm-eval itself runs at every one of several workers as if it were alone; each runs some batches of the requests, and
    all have the answers to all. What is in a batch does not depend on how many workers there are.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        protocol: str,
        batch_size: int,
        end_tokens: Sequence[int] = (),
        each: Each = EACH_ALONE,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise UserError("the tokenizer has neither a BOS nor an EOS token; lm-eval tasks need one to start from")
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.protocol = protocol
        self.batch_size = batch_size
        self.each = each
        self.vocabulary = vocabulary
        self.truncated_requests = 0
        self.end_tokens = frozenset((*end_tokens, self.tokenizer.eos_token_id))
        self._prefix_token_id: int = prefix

    @property
    def device(self) -> torch.device:
        return self.scorer.device

    @property
    def eot_token_id(self) -> int:
        """EOS; where the tokenizer has none, its BOS."""
        eos: int | None = self.tokenizer.eos_token_id
        return self._prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, BOS first where the tokenizer puts it there; `add_special_tokens` False: what it spells alone.
        Raises `UserError` for a text with a token that the model does not have."""
        ids = encode(self.tokenizer, string, () if add_special_tokens is False else bos_tokens(self.tokenizer))
        if self.vocabulary is not None:
            check_ids(self.tokenizer, ids, self.vocabulary, f"the task's text {string[:60]!r}")
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without `add_generation_prompt` it ends within the last message.

        As lm-eval does it, a template that refuses system messages gets the conversation without them. Raises
        `UserError` where the model has no template, or it refuses that too.
        """
        template = self.chat_template()

        def render(messages: list[dict[str, str]]) -> str:
            return render_chat(
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **named_tokens(self.tokenizer.special_tokens_map),
            )

        try:
            return render(chat_history)
        except UserError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) in (0, len(chat_history)):
                raise
            logger.warning("%s; system messages are left out", error)
            return render(others)

    def chat_template(self, chat_template: bool | str = True) -> str:
        """The model's template. Raises `UserError` where it has none, or for the name of one: only its own is known."""
        if isinstance(chat_template, str):
            raise UserError(f"chat template {chat_template!r}: sparsepack knows a model's default one; name none")
        found = template_of({"chat_template": self.tokenizer.chat_template})
        if found is None:
            raise UserError("this model has no chat template; leave out --apply-chat-template")
        return found

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """TemplateLM's likelihoods, without a progress bar: `_loglikelihood_tokens` shows one."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is it the greedy continuation) of each `(texts, context, continuation)`."""
        requests_of: dict[ScoredRow, list[int]] = defaultdict(list)  # choices of one token share their row
        truncated = 0
        for index, (texts, context, continuation) in enumerate(requests):
            self._check_continuation(texts, continuation)
            ids = tuple((context + continuation)[:-1])
            truncated += len(ids) > self.scorer.context
            ids = ids[-self.scorer.context :]
            requests_of[ScoredRow(ids, len(ids) - len(continuation))].append(index)
        self._warn_truncated(truncated)

        def score(batch: list[ScoredRow]) -> dict[int, tuple[float, bool]]:
            scores: dict[int, tuple[float, bool]] = {}
            for row, logits in zip(batch, self._logits(batch), strict=True):
                log_probs = torch.log_softmax(logits[row.scored : len(row.ids)].float(), dim=-1)  # [N, V]
                greedy = log_probs.argmax(dim=-1)
                for index in requests_of[row]:
                    targets = torch.tensor(requests[index][2], device=log_probs.device)  # [N]
                    total = log_probs.gather(1, targets[:, None]).double().sum().item()
                    if total != total:
                        # argmax over NaN picks choice 0, which is the right one throughout BLiMP
                        raise UserError(
                            "the model's outputs are not numbers (NaN), so that no score means anything; its weights "
                            "are damaged, or overflow in this --dtype: try float32"
                        )
                    scores[index] = (total, bool((greedy == targets).all()))
            return scores

        # The longest first, rows of about one length together: what does not fit in memory shows at once. Choices for
        # one context are neighbours, whatever their lengths: a scorer can compute it once.
        longest: dict[tuple[int, ...], int] = defaultdict(int)
        for row in requests_of:
            longest[row.context] = max(longest[row.context], len(row.ids))
        rows = sorted(requests_of, key=lambda row: (-longest[row.context], row.context, -len(row.ids), row))
        scores = self._answers(rows, score, "scoring", [request[1:] for request in requests])
        return [(scores[index][0], scores[index][1]) for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each whole text, in nats, over lm-eval's windows: every token is a target exactly once.

        A window of `context` inputs starts after one token of context, and the last one re-reads what fills it. These
        windows are the same in every protocol, so that their figures compare; `decode` therefore runs all but the
        re-read tokens sparse. Perplexity with half of each window as dense context scores half of the tokens, which
        lm-eval's per-word metrics do not allow. Unlike HFLM, a BOS that the tokenizer adds is not a target.
        """
        windows: list[tuple[None, list[int], list[int]]] = []
        window_counts = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.scorer.context,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *utils.make_disjoint_window(window)) for window in rolling]
            window_counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in window_counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continues each context as lm-eval's HFLM does, computing the whole row anew for every token.

        A continuation ends at any of the model's end tokens, at `max_gen_toks`, or as soon as its text holds any of the
        `until` strings or the text of the tokenizer's EOS; it is cut before them. Stop strings may span tokens, begin
        inside one, or be the text of a special token; the context never counts. Special tokens are not part of the
        answer. Sampling draws from one seeded generator per request, so neither batch size nor order matters. Raises
        UserError for options that are not known.
        """
        rows_of: dict[GenerationArguments, dict[int, ScoredRow]] = defaultdict(dict)
        truncated = 0
        for index, (text, options) in enumerate(request.args for request in requests):
            generation = _generation(options, self.tokenizer.eos_token)
            capacity = self.scorer.context - generation.max_new
            if capacity < 1:
                raise UserError(
                    f"{generation.max_new} new tokens leave no room for a question in a context of "
                    f"{self.scorer.context}; set a smaller max_gen_toks in the task's generation_kwargs"
                )
            ids = tuple(self.tok_encode(text)) or (self.prefix_token_id,)
            truncated += len(ids) > capacity
            ids = ids[-capacity:]
            rows_of[generation][index] = ScoredRow(ids, len(ids) - 1)
        self._warn_truncated(truncated)

        answers: dict[int, str] = {}
        for generation, rows in rows_of.items():
            order = sorted(rows, key=lambda index: (-len(rows[index].ids), index))
            work = functools.partial(self._generate, rows, generation)
            answers |= self._answers(order, work, "generating", [asdict(generation), [asdict(rows[i]) for i in order]])
        return [answers[index] for index in range(len(requests))]

    def _answers(
        self, items: list[T], work: Callable[[list[T]], dict[int, Any]], what: str, asked: Any
    ) -> dict[int, Any]:
        """What `work` finds for all items, by the number of a request: a batch of them at a time, each at one of the
        workers. asked -- JSON-able, the same at all workers unless their tasks or tokenizers differ"""
        batches = [items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size)]
        with progress(f"{what} requests", len(items)) as advance:
            found = self.each(
                batches,
                lambda batch: [*work(batch).items()],
                done=lambda run: advance(sum(map(len, run))),
                facts=lambda: {"list of requests": fingerprint(asked)},
            )
        return {index: value for batch in found for index, value in batch}

    def _generate(
        self, rows: dict[int, ScoredRow], generation: GenerationArguments, chosen: list[int]
    ) -> dict[int, str]:
        """Continue the chosen rows together."""
        produced: dict[int, list[int]] = {index: [] for index in chosen}
        randoms = {index: torch.Generator().manual_seed(SAMPLING_SEED + index) for index in chosen}
        processors, ends = generation.processors(), sorted((generation.ends or self.end_tokens) - {None})
        live = chosen
        for _ in range(generation.max_new):
            batch = [ScoredRow((*rows[index].ids, *produced[index]), rows[index].scored) for index in live]
            still = []
            for index, row, logits in zip(live, batch, self._logits(batch), strict=True):
                scores = logits[len(row.ids) - 1][None].float()
                if len(produced[index]) < generation.min_new:
                    scores[:, [end for end in ends if end < scores.shape[1]]] = -math.inf
                scores = processors(torch.tensor([row.ids], device=scores.device), scores)[0]
                if generation.sample:
                    shares = torch.softmax(scores.cpu(), dim=-1)
                    token = int(torch.multinomial(shares, 1, generator=randoms[index]))
                else:
                    token = int(scores.argmax())
                produced[index].append(token)  # an end, too: decoding leaves it out where it is special
                if token in ends:
                    continue
                if generation.max_length is not None and len(row.ids) + 1 >= generation.max_length:
                    continue
                text = self.tokenizer.decode(produced[index])
                if not any(stop in text for stop in generation.until):
                    still.append(index)
            live = still
            if not live:
                break
        return {
            index: _cut(self.tokenizer.decode(tokens, skip_special_tokens=True), generation.until)
            for index, tokens in produced.items()
        }

    def _logits(self, rows: Sequence[ScoredRow]) -> torch.Tensor:
        """Logits `[B, S, V]` of the rows, right-padded to the longest, under this model's protocol; from where they are
        scored on."""
        lengths = torch.tensor([len(row.ids) for row in rows])
        width = int(lengths.max())
        input_ids = torch.full((len(rows), width), self.eot_token_id)
        for ids, row in zip(input_ids, rows, strict=True):
            ids[: len(row.ids)] = torch.tensor(row.ids)
        sparse_from = torch.tensor([{"decode": row.scored, "all": 0, "dense": width}[self.protocol] for row in rows])
        scored_from = torch.tensor([row.scored for row in rows])
        arguments = (input_ids, lengths, sparse_from, scored_from)
        with torch.no_grad():
            return self.scorer.logits(*(each.to(self.device) for each in arguments))

    def _check_continuation(self, texts: Any, continuation: list[int]) -> None:
        if not continuation:
            raise UserError(
                f"no token of its own in the continuation of {texts!r}: it merges with the context's last token; "
                "start it with a space (target_delimiter) in the task's YAML file"
            )
        if len(continuation) > self.scorer.context:
            raise UserError(
                f"a continuation of {len(continuation)} tokens exceeds the context of {self.scorer.context}"
            )

    def _warn_truncated(self, count: int) -> None:
        self.truncated_requests += count
        if count:
            logger.warning("%d requests exceed the context of %d; cut at their beginning", count, self.scorer.context)


def _generation(options: dict[str, Any], eos: str | None) -> GenerationArguments:
    """What a task's generation_kwargs mean to lm-eval's HFLM. Raises `UserError` for what is not known."""
    normal: dict[str, Any] = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
    stops = normal.pop("until")
    if wrong := [stop for stop in stops if not isinstance(stop, str | None)]:
        raise UserError(
            f"generation option until {str(wrong[0])[:60]}: expected text; put it in quotes in the task's file"
        )
    until = tuple(dict.fromkeys(stop for stop in (*stops, eos) if stop))
    max_new, max_length = int(normal.pop("max_gen_toks")), normal.pop("max_length", None)
    sample, min_new = bool(normal.pop("do_sample")), int(normal.pop("min_new_tokens", None) or 0)
    ends = normal.pop("eos_token_id", None)
    if sample:
        normal.setdefault("top_k", _TOP_K)
    changes = []
    for name in (*_PENALTIES, *_WARPERS):
        value = normal.pop(name, None)
        if value is not None and value != _NEUTRAL.get(name) and (sample or name in _PENALTIES):
            changes.append((name, value))
    unknown = [
        name for name in normal if name not in _WITHOUT_EFFECT and normal[name] not in (None, _NEUTRAL.get(name))
    ]
    if unknown:
        known = ("until", "max_gen_toks", "max_length", "min_new_tokens", "do_sample", *_PENALTIES, *_WARPERS)
        said = ", ".join(f"{name} {str(normal[name])[:60]}" for name in sorted(unknown))
        raise UserError(
            f"generation option {said} is not supported; a task's generation_kwargs may have {', '.join(known)}, and "
            "one beam"
        )
    return GenerationArguments(
        until,
        max_new,
        sample,
        None if max_length is None else int(max_length),
        min_new,
        frozenset(token_ids(ends)),
        tuple(changes),
    )


def _cut(text: str, until: Sequence[str]) -> str:
    for stop in until:  # one after the other, as HFLM does: what is cut holds no other one any more
        text = text.split(stop)[0]
    return text
