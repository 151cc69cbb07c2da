"""Calibration text that needs no file and no network: what the model itself writes.

Questions of `data/prompts.json` become conversations by the model's chat template, openings are continued as they are,
in turns; a model without a template has openings alone.
"""

import itertools
import json
from pathlib import Path

from sparsepack.data import PROMPTS
from sparsepack.errors import TextError
from sparsepack.files.atomic import write_bytes
from sparsepack.loading import Model
from sparsepack.progress import progress
from sparsepack.runtime.options import GenerateOptions

LENGTH = 192
"""Tokens of a text at most, besides its prompt."""
TEMPERATURE = 0.8
"""Below 1: what a small model draws at 1 wanders off."""


def write_own_text(model: Model, output: Path, tokens: int, seed: int = 0) -> None:
    """Write documents of so many tokens in all, their prompts included, as lines `{"text": ...}` to a `.jsonl` file,
    whole or not at all. Raises `TextError` where the model ends its answers before they have begun."""
    prompts = itertools.cycle(prompts_of(model))
    together = len(model.engine.positions)
    documents, written, seeds = list[str](), 0, itertools.count(seed)
    with progress("writing calibration text", tokens) as advance:
        while written < tokens:
            batch = list(itertools.islice(prompts, together))
            options = GenerateOptions(LENGTH, temperature=TEMPERATURE, repeat_penalty=1.0, seed=next(seeds))
            generated = model.generate_together(batch, options)
            if sum(len(each.tokens) for each in generated) < together:
                raise TextError("the model writes no text of its own: its answers are empty; give --text FILE")
            count = sum(each.prompt_tokens + len(each.tokens) for each in generated)
            documents += [prompt + each.text for prompt, each in zip(batch, generated, strict=True)]
            advance(min(count, tokens - written))
            written += count
    lines = (json.dumps({"text": document}, ensure_ascii=False) for document in documents)
    write_bytes(output, "".join(f"{line}\n" for line in lines).encode())


def prompts_of(model: Model) -> list[str]:
    """Return what a model is given to begin with, each prompt once."""
    shipped = json.loads(PROMPTS.read_text(encoding="utf-8"))
    openings: list[str] = shipped["openings"]
    if model.chat_template is None:
        return openings
    questions = [model.chat_prompt([{"role": "user", "content": text}]) for text in shipped["questions"]]
    return [prompt for pair in zip(questions, openings, strict=True) for prompt in pair]
