"""Files that transformers would read from a folder although its manifest does not list them."""

import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from sparsepack.errors import ArtifactError
from sparsepack.formats.containers.safetensors.layout import MANIFEST

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.distcp")
_TEXTS = ("*.json", "*.jinja", "*.py", "*chat_templates", "custom_generate")
_VOCABULARIES = (
    *("*.model", "*.spm", "*.bpe", "*.codes", "*.tokenizer", "*.tiktoken"),
    *("vocab*.txt", "merges*.txt", "dict.txt"),
)
READ = (*_WEIGHTS, *_TEXTS, *_VOCABULARIES)
"""Patterns, in lower case, of all names under which models, adapters, tokenizers, processors and templates of any
family look for a file or a folder: added_tokens.json and adapter_config.json for two. A README, a licence, a picture or
notes may lie in a folder."""


def check_unlisted(path: Path, files: Collection[str]) -> None:
    """Raise `ArtifactError` for a file or folder in `path` that transformers may read and `files` does not name."""
    for name in sorted(os.listdir(path)):
        if name in files or name == MANIFEST:
            continue
        if any(fnmatchcase(name.lower(), pattern) for pattern in READ):
            raise ArtifactError(
                f"{path}: {name[:100]!r} is none of the files that were packed, and transformers may read it; move it "
                "to another folder"
            )
