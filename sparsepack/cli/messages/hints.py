"""Verbs that newcomers type, and what does that here."""

import difflib
from collections.abc import Iterable

_PACK = "pack MODEL -o FILE"
_GENERATE = "generate FILE --prompt TEXT"
_HERE = {
    _PACK: ("quantize", "quantise", "convert", "compress", "sparsify", "export", "make", "build"),
    _GENERATE: ("complete", "completion", "infer", "inference", "predict", "prompt"),
    "generate FILE --chat": ("chat", "converse", "cli", "interactive"),
    "eval FILE --perplexity TEXT": ("perplexity", "ppl", "evaluate", "accuracy", "score"),
    "eval FILE --tasks NAMES": ("lm-eval", "lm_eval", "tasks"),
    "bench FILE": ("benchmark", "speed", "time", "llama-bench"),
    "serve FILE": ("server", "run-server", "start", "host", "api", "openai"),
    "calibrate MODEL --text TEXT -o FOLDER": ("calibration", "collect", "imatrix", "stats"),
    "prune MODEL --keep 2 --of 4 -o FOLDER": ("pruning", "prune-weights", "sparsegpt", "wanda"),
    "rotate MODEL --calibration CAL -o FOLDER": ("rotation", "quarot", "slicegpt", "hadamard", "larosa"),
    "distil MODEL --calibration CAL -o FOLDER": ("distill", "distillation", "finetune", "fine-tune", "train", "lora"),
    "inspect FILE": ("info", "show", "describe", "dump", "print", "cat"),
    "verify FILE": ("check", "validate", "hash", "sha256"),
    "push FILE OWNER/NAME": ("upload", "publish"),
    "tune": ("autotune", "optimize", "optimise"),
    "run RECIPE": ("recipe", "pipeline", "all", "execute"),
    "run --list": ("recipes", "list", "ls"),
    "--help": ("help", "usage", "man"),
    "--version": ("version",),
}
_HINTS = {word: command for command, words in _HERE.items() for word in words}


def hint(word: str, verbs: Iterable[str]) -> str:
    """What to type in place of a word that is no verb."""
    if (command := _HINTS.get(word.lower())) is not None:
        return f"give sparsepack {command}"
    if near := difflib.get_close_matches(word.lower(), [*verbs, *_HINTS], 1):
        return f"give sparsepack {_HINTS.get(near[0], near[0])}"
    return f"expected one of {', '.join(verbs)}"
