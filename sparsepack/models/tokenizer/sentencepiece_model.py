"""The tokenizer of a folder that has a `tokenizer.model` of SentencePiece's, and no tokenizer.json.

transformers converts such a file too, but without a tokenizer_config.json it takes a class that neither marks the
beginning of a text nor squeezes spaces where the file asks for it. Here the tokens are SentencePiece's own, id for id.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.stored import shown
from sparsepack.models.tokenizer.tokenizer_json import CONTROL, UNUSED, USER_DEFINED, Vocabulary, sentencepiece

FILE = "tokenizer.model"
_BPE = 2
_MOST_ADDED = 1 << 16
_IDS = {"bos": "bos_id", "eos": "eos_id", "unk": "unk_id", "pad": "pad_id"}
_INSTEAD = "save the tokenizer as tokenizer.json (AutoTokenizer, then save_pretrained)"


def sentencepiece_json(folder: Path) -> str:
    """The content of a tokenizer.json with which a text has the tokens that it has in SentencePiece.

    Tokens that added_tokens.json and tokenizer_config.json add are added. BOS is put before a text unless
    `add_bos_token` in tokenizer_config.json says otherwise, as Llama's tokenizer does.

    Raises `CheckpointError` for a file that is not SentencePiece's (Meta's `tokenizer.model` of Llama 3 is tiktoken's)
    or that normalises text or is not BPE.
    """
    model, config = _read(folder / FILE), sentencepiece_config(folder)
    tokens = [piece.piece for piece in model.pieces]
    kinds = [int(piece.type) for piece in model.pieces]
    scores = [float(piece.score) for piece in model.pieces]
    for id, (text, special) in sorted(_added(folder, config).items()):
        missing = id + 1 - len(tokens)
        if not 0 <= id < len(model.pieces) + _MOST_ADDED:
            raise CheckpointError(f"{folder}: the added token {text[:40]!r} has the id {id}; {_INSTEAD}")
        tokens += [""] * missing
        kinds += [UNUSED] * missing
        scores += [0.0] * missing
        tokens[id], kinds[id] = text, CONTROL if special else USER_DEFINED
    special_tokens = {kind: config[f"{kind}_token"] for kind in _IDS if config.get(f"{kind}_token") in tokens}
    adds = {"add_bos": config.get("add_bos_token", True), "add_eos": config.get("add_eos_token", False)}
    vocabulary = Vocabulary(tokens, kinds, special_tokens, **adds)
    rules = model.normalizer_spec
    try:
        return sentencepiece(vocabulary, scores, prefix=rules.add_dummy_prefix, squeeze=rules.remove_extra_whitespaces)
    except ValueError as error:
        raise CheckpointError(f"{folder / FILE}: {error}; save the tokenizer again") from error


def sentencepiece_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, its special tokens as texts; those that it and special_tokens_map.json do not name are
    the ones of `tokenizer.model`."""
    model = _read(folder / FILE)
    ids = {kind: getattr(model.trainer_spec, id) for kind, id in _IDS.items()}
    found: dict[str, Any] = {
        f"{kind}_token": model.pieces[id].piece for kind, id in ids.items() if 0 <= id < len(model.pieces)
    }
    found |= _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")
    for kind in _IDS:
        token = found.get(f"{kind}_token")
        found[f"{kind}_token"] = token.get("content") if isinstance(token, dict) else token
    return found


def _read(path: Path) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # protobuf refuses files that a newer one generated, by an error of its own
        reason = str(error).split(". ")[0]
        raise CheckpointError(
            f"{path}: sentencepiece cannot be used here ({reason}); upgrade protobuf, or {_INSTEAD}"
        ) from error

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
        if not model.pieces:
            raise DecodeError("no pieces")
    except DecodeError as error:
        raise CheckpointError(
            f"{path}: not a SentencePiece model, or damaged (tiktoken's files have this name too); {_INSTEAD}"
        ) from error
    if model.trainer_spec.model_type != _BPE:
        raise CheckpointError(f"{path}: a SentencePiece model that is not BPE; {_INSTEAD}")
    if model.normalizer_spec.precompiled_charsmap:
        raise CheckpointError(
            f"{path}: normalises text by {model.normalizer_spec.name or 'rules of its own'}, which is not read; "
            f"{_INSTEAD}"
        )
    return model


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({shown(error)}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; download it again")
    return value


def _added(folder: Path, config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """The tokens that are added to the file's: id -> (text, whether it is special)."""
    try:
        named = {int(id): (str(text), False) for text, id in _object(folder / "added_tokens.json").items()}
        listed = (config.get("added_tokens_decoder") or {}).items()
        return named | {int(id): (str(token["content"]), bool(token.get("special"))) for id, token in listed}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its added tokens are not understood ({error!r}); {_INSTEAD}") from error
