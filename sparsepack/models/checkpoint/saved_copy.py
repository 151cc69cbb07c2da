"""A packed folder without its manifest: what `save_pretrained` makes of a model that transformers loaded from one.

transformers writes the tensors and config.json; it tells the quantizer neither the folder nor when the files are there,
so nobody could write the hashes.
"""

import json
from pathlib import Path

MANIFEST, METHOD = "sparsepack.json", "sparsepack"
"""The name of a packed folder's manifest, and what `quant_method` in its config.json says."""


def is_saved_copy(folder: Path) -> bool:
    """Whether a folder says in config.json that it was packed, and has no manifest."""
    path = folder / "config.json"
    if not path.is_file() or (folder / MANIFEST).exists():  # a device has no end
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == METHOD)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def told_of_copy(name: str | Path) -> str:
    """What a user of such a folder is told, in one line."""
    return (
        f"{name}: a packed model without {MANIFEST}, by which sparsepack reads and checks a folder; transformers' "
        "save_pretrained leaves that file out, and transformers alone loads such a copy. Expected the folder that "
        "`sparsepack pack` wrote: take that one, or pack the pruned model again"
    )
