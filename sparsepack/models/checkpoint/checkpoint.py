"""A checkpoint: configuration, tokenizer and tensors of a trained model, read one decoder block at a time.

Accepted: a local Hugging Face folder (safetensors, sharded or not, quantised by one of `checkpoint.schemes` or not),
a hub id, a GGUF as llama.cpp's programs make it, quantised or not, split or not, and the models that ship with
sparsepack.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.gguf import GgufFile, read_split_gguf
from sparsepack.files.stored import Stored, shown, validate
from sparsepack.files.transfer import Workspace
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import ExpertNumbers
from sparsepack.models.checkpoint.codes import is_ternary
from sparsepack.models.checkpoint.config_files import suggested
from sparsepack.models.checkpoint.configuration import Described, checked_family, file_config, folder_config
from sparsepack.models.checkpoint.converted import found_source
from sparsepack.models.checkpoint.delta_net import apart_source
from sparsepack.models.checkpoint.experts import as_experts, experts_source, folded_source, fused_source, ordered_source
from sparsepack.models.checkpoint.llama_cpp_parts import joined_source
from sparsepack.models.checkpoint.locate import located
from sparsepack.models.checkpoint.quantised import quantised_source
from sparsepack.models.checkpoint.safetensors_source import SafetensorsSource
from sparsepack.models.checkpoint.sources import (
    GgufSource,
    MadeSource,
    StoredSource,
    StoredType,
    TensorSource,
    resolve_output,
)
from sparsepack.models.families import check_taken
from sparsepack.models.family import Family
from sparsepack.models.found import FoundFamily
from sparsepack.models.hf_config import architecture_of, expert_numbers, token_ids, token_weights
from sparsepack.models.hf_model.model import check_stock_model
from sparsepack.models.sites import SiteKey
from sparsepack.models.tokenizer.chat import DEFAULT, folder_templates, named_tokens, templates_of, turn_ends
from sparsepack.models.tokenizer.gguf_tokenizer import gguf_tokenizer_config, gguf_tokenizer_json, gguf_turn_ends
from sparsepack.models.tokenizer.sentencepiece_model import sentencepiece_config, sentencepiece_json
from sparsepack.models.tokenizer.tokenizer import (
    carried_json,
    check_fits,
    folder_tokenizer,
    gguf_tokenizer,
    only_sentencepiece,
)
from sparsepack.models.tokenizer.tokens import backend_of, bos_tokens
from sparsepack.progress import say

T = TypeVar("T")
_TERNARY_ROWS = 16
"""So many rows of a matrix tell whether it is ternary."""


@dataclass(frozen=True)
class Checkpoint:
    """A source model. `config` is the stock transformers configuration.

    bases -- the blocks before which the residual stream changes its basis, ascending: a segment begins at each
    stored_types -- how its tensors are stored
    ternary -- whether plain numbers of its matrices lie on a ternary grid, by a few rows of them
    """

    name: str
    path: Path
    config: Any
    family: Family
    source: TensorSource
    bases: tuple[int, ...] = ()
    stored_types: tuple[StoredType, ...] = ()
    ternary: bool = False

    @property
    def grid(self) -> str | None:
        """What to say of weights that were quantised before; None: they were not."""
        kinds = sorted({each.name for each in self.stored_types if each.quantised})
        if not kinds and not self.ternary:
            return None
        of = f"weights are quantised already ({', '.join(kinds)})"
        if not kinds:
            of = "weights have three values each, -s, 0 and s, with an s for many neighbours"
        return (
            f"{of}: losses are measured against them, not against the original weights, and a type with the same grid "
            "loses nothing more"
        )

    def family_at(self, layer: int) -> Family:
        """The names of a block."""
        return self.family.at(self.config, layer)

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding: `lm_head` then has no tensor of its own to touch."""
        return bool(self.config.tie_word_embeddings)

    @property
    def gguf(self) -> GgufFile | None:
        """The file and its keys where the checkpoint is a GGUF."""
        return self.source.file

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type in which most of the weights are stored."""
        weights: Counter[torch.dtype] = Counter()
        for name, dtype in self.source.dtypes.items():
            weights[dtype] += math.prod(self.source.shapes[name])
        return weights.most_common(1)[0][0]

    @property
    def sha256(self) -> str:
        """Hash of all weight bytes."""
        return self.source.hash.sha256()

    @cached_property
    def sites(self) -> tuple[SiteKey, ...]:
        """Every site of every block, in order of execution."""
        return tuple((layer, site) for layer in range(self.layers) for site in self.family.projections_of(layer))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, in its stored dtype, on the CPU."""
        if name == self.family.head and self.tied:
            name = self.family.embedding
        if self._is_bare_norm(name):
            return torch.full((self.config.hidden_size,), float(name.endswith(".weight")))
        if name not in self.source.shapes:
            near = difflib.get_close_matches(name, self.source.shapes, 1)
            raise CheckpointError(f"{self.name}: the tensor {name} is missing{f'; nearest: {near[0]}' if near else ''}")
        return self.source.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return (self.config.hidden_size,) if self._is_bare_norm(name) else self.source.shapes[name]

    def _is_bare_norm(self, name: str) -> bool:
        """Whether it is the weight or the bias of a norm that has none."""
        norms = tuple(f".{module}" for module in (*self.family.norms.values(), self.family.after[-1]))
        none = self.family.bare_norms or (not self.family.norm_biases and name.endswith(".bias"))
        return none and name.rpartition(".")[0].endswith(norms)

    def activation_parameters(self, layer: int) -> torch.Tensor:
        """What a block has learned of its activation (`Family.activation_parameters`), float32 [its number]."""
        block = self.family.block(layer)
        return torch.cat([self.tensor(f"{block}.{n}").float().view(1) for n in self.family.activation_parameters])

    def norm(self, name: str) -> torch.Tensor:
        """What a norm multiplies by, float32, by the name of its tensor."""
        return self.tensor(name).float() + self.family.norm_offset_of(name)

    def stacked(self, layer: int, site: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix of a site, its projections' rows stacked: weight [rows, columns], bias [rows] or None."""
        return torch.cat(self.projections(layer, site)), self.stacked_bias(layer, site)

    def stacked_floats(self, layer: int, site: str, workspace: Workspace) -> torch.Tensor:
        """The matrix of a site that is no mixture's in float32, [rows, columns], in the memory of a workspace. One more
        projection is in memory meanwhile."""
        names = self.weight_names(layer, site)
        stacked = workspace.floats(*self.stacked_shape(site, layer))
        parts = torch.split(stacked, [math.prod(self.source.shapes[name][:-1]) for name in names])
        for name, part in zip(names, parts, strict=True):
            part.copy_(self.tensor(name).flatten(0, -2))
        return stacked

    def projections(self, layer: int, site: str) -> list[torch.Tensor]:
        """The matrices of a site one by one, in the order in which they are stacked; those of all experts are one, and
        the parts of a shared one as wide as these another."""
        weights = [self.tensor(name) for name in self.weight_names(layer, site)]
        if weights[0].dim() == 3 and len(weights) > 1 and self.family.has_row:
            width = self.family.setting(self.config, "intermediate_size")
            weights = [weights[0], as_experts(site, weights[1:], width)]
        return [weight.flatten(0, -2) for weight in weights]

    def experts(self, layer: int, site: str) -> torch.Tensor:
        """The matrices of all experts at a site of the MLP: [experts, rows, columns]."""
        numbers, found = expert_numbers(self.config), self.projections(layer, site)
        assert numbers is not None
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return torch.unflatten(whole, 0, (numbers.stored, -1))

    def each_expert(self, layer: int, site: str) -> Iterator[torch.Tensor]:
        """The same one by one, [rows, columns]; where each is stored by itself, one at a time is in memory."""
        first, *shared = self.weight_names(layer, site)
        yield from self.source.slices(first) if isinstance(self.source, MadeSource) else self.tensor(first)
        if shared:
            width = self.family.setting(self.config, "intermediate_size")
            yield from as_experts(site, [self.tensor(name) for name in shared], width)

    def weight_names(self, layer: int, site: str) -> list[str]:
        """The names of the tensors of a site, in the order in which they are stacked."""
        block = self.family.block(layer)
        projections = self.family_at(layer).projections_of(layer)[site]
        return [f"{block}.{self.family.weight(projection)}" for projection in projections]

    def gate_and_up(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate's and up's rows of `mlp_in`, each [intermediate, hidden], however the family stores them."""
        stored = self.projections(layer, "mlp_in")
        gate, up = stored if len(stored) == 2 else stored[0].chunk(2)
        return gate, up

    def stacked_bias(self, layer: int, site: str) -> torch.Tensor | None:
        """The bias [rows] of a site's stacked matrix, zeros for projections that have none, or None; of
        experts [experts, rows]."""
        names = self.bias_names(layer, site)
        if not any(name in self.source.shapes for name in names):
            return None
        return torch.cat([self._bias(*of) for of in zip(names, self.weight_names(layer, site), strict=True)])

    def _bias(self, name: str, weight: str) -> torch.Tensor:
        if name in self.source.shapes:
            return self.tensor(name)
        return torch.zeros(self.source.shapes[weight][0], dtype=self.source.dtypes[weight])

    def bias_names(self, layer: int, site: str) -> list[str]:
        """What the biases of a site's projections are called, of those that have one."""
        block = self.family.block(layer)
        projections = self.family_at(layer).projections_of(layer)[site]
        return [f"{block}.{self.family.bias(projection)}" for projection in projections]

    def stacked_shape(self, site: str, layer: int = 0) -> tuple[int, int]:
        """(rows, columns) of a site's stacked matrix, without reading it."""
        shapes = [self.source.shapes[name] for name in self.weight_names(layer, site)]
        columns = shapes[0][-1]  # a shared expert may have more, in as many parts
        return sum(math.prod(shape) for shape in shapes) // columns, columns

    def token_weights(self, site: str, layer: int = 0) -> int:
        """How many weights of a site a token has to do with, were nothing skipped: all, but of experts those it has."""
        return token_weights(self.config, self.source.shapes, layer, site)

    @cached_property
    def tokenizer(self) -> Any:
        """The stock tokenizer; raises `CheckpointError` where it is missing or does not fit the model."""
        try:
            if self.gguf is not None:
                tokenizer = gguf_tokenizer(self.gguf, self.name)
            else:
                tokenizer = folder_tokenizer(self.path, self.config)
            # What does not fit together shows only in use.
            list(tokenizer("a b", add_special_tokens=False, verbose=False)["input_ids"])
        except CheckpointError:
            raise
        except Exception as error:  # the libraries raise many kinds for one mistake
            reason = shown(error).rstrip(" :")
            raise CheckpointError(
                f"{self.name}: its tokenizer cannot be loaded ({reason}); expected in the GGUF itself, "
                "or as tokenizer.json in the folder of the weights"
            ) from error
        check_fits(tokenizer, self.config.vocab_size, self.name)
        return tokenizer

    @property
    def special_tokens(self) -> dict[str, Any]:
        """The texts of the tokenizer's special tokens, as chat templates name them: bos_token and the like."""
        return named_tokens(self.tokenizer.special_tokens_map)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """What tokenizer_config.json says, made where there is none. Raises `PackingError` where it is no JSON object,
        and `CheckpointError`."""
        if self.gguf is not None:
            return gguf_tokenizer_config(self.gguf, self.name)
        if only_sentencepiece(self.path):
            return sentencepiece_config(self.path)
        path = self.path / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise PackingError(f"{path}: not JSON ({shown(error)}); download it again") from error
        if not isinstance(config, dict):
            raise PackingError(f"{path}: expected a JSON object; download it again")
        return config

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates that it brings, by their names. Raises as `tokenizer_config`, and `PackingError` for one
        that is no text."""
        if self.gguf is not None:
            return templates_of(self.tokenizer_config)
        return folder_templates(self.path, self.tokenizer_config)

    @cached_property
    def architecture(self) -> Architecture:
        """The numbers that an engine needs. Raises `CheckpointError` for what none here can run."""
        check_taken("pack", self.family, self.name)
        rows = range(self.config.vocab_size)
        bos = next((id for id in (self.tokenizer.bos_token_id, *bos_tokens(self.tokenizer)) if id in rows), None)
        ends = [id for id in (self.tokenizer.eos_token_id, *self.turn_ends) if id in rows]
        try:
            found = architecture_of(self.config, bos, [*self.end_tokens, *ends])
            check_numbers(found)
            return found
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        except Exception as error:  # transformers' own code, on numbers that it did not check
            raise CheckpointError(f"{self.name}: its configuration is not understood ({shown(error)})") from error

    @cached_property
    def turn_ends(self) -> list[int]:
        """The ids of the tokens that end a turn, whether or not its configurations name them: first the one that its
        chat template writes behind an answer."""
        added = {token.content: id for id, token in backend_of(self.tokenizer).get_added_tokens_decoder().items()}
        try:
            template = self.chat_templates.get(DEFAULT)
        except PackingError:  # pack says so, where the template is needed
            template = None
        ends = [added[token] for token in turn_ends(template, self.special_tokens, added)]
        return list(dict.fromkeys([*ends, *([] if self.gguf is None else gguf_turn_ends(self.gguf))]))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: chat models end a turn with some that only generation_config.json names. Raises
        `CheckpointError`."""
        more = self._of_generation(lambda config: validate(_Generation, config).eos_token_id)
        own = token_ids(getattr(self.config, "eos_token_id", None))
        return tuple(dict.fromkeys([*own, *token_ids(more)]))

    @cached_property
    def generation(self) -> dict[str, float]:
        """How its makers would have tokens chosen (`models.checkpoint.config_files`). Raises `CheckpointError`."""
        return self._of_generation(suggested)

    def _of_generation(self, read: Callable[[dict[str, Any]], T]) -> T:
        path = self.path / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            return read(validate(_Generation, config).model_dump())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a generation configuration ({shown(error)})") from error

    def tokenizer_json(self) -> str:
        """The content of `tokenizer.json`, made where there is none; raises `CheckpointError` where it cannot be."""
        return self._tokenizer_json

    @cached_property
    def _tokenizer_json(self) -> str:
        if self.gguf is not None:
            return gguf_tokenizer_json(self.gguf, self.name)
        if only_sentencepiece(self.path):
            return sentencepiece_json(self.path)
        path = self.path / "tokenizer.json"
        return carried_json(self.tokenizer, path.read_text(encoding="utf-8") if path.is_file() else None)


class _Generation(Stored):
    eos_token_id: int | list[int] | None = None  # -1: none


def open_checkpoint(name: str | Path, hashed: bool = False) -> Checkpoint:
    """Open a checkpoint by folder, file or hub id.

    hashed -- whether its hash will be asked for: threads begin to take it, beside what comes until then

    Raises `CheckpointError` naming what is missing, unknown or not understood. Of the weights it reads no more than
    what tells whether the output matrix is the embedding.
    """
    name = str(name)
    path = located(name)
    file = read_split_gguf(path) if path.is_file() else None
    described = folder_config(path, name) if file is None else Described(file_config(file, name))
    config, bases = described.config, described.bases
    family = checked_family(config, name)
    stored: StoredSource
    if file is not None:
        stored = GgufSource(file, family, config)
        omitted, left_out = stored.omitted, {"blk.": "what blocks behind the last one predict"}
    else:
        in_files = SafetensorsSource(path, family.decoder, described.part, tuple(family.left_out), family.renamed)
        omitted, left_out = in_files.omitted, dict(family.left_out)
        stored = quantised_source(in_files, described.quantised, path)
    for what in dict.fromkeys(left_out.values()):
        prefixes = [begins for begins, described in left_out.items() if described == what]
        if left := [begins for tensor in omitted for begins in prefixes if tensor.startswith(begins)]:
            first, *others = dict.fromkeys(f"{begins}*" for begins in left)
            named_so = f"{first} and {len(others)} prefixes more" if others else first
            say(f"{name}: {what} ({named_so}, {len(left)} tensors) is left out: nothing here computes it")
    if hashed:
        stored.hash.begin()
    source: TensorSource
    named = found_source(config, stored, name) if isinstance(family, FoundFamily) else stored
    apart = apart_source(named, family, config)
    ordered = joined_source(apart, config) if file is not None and family.latent else apart
    source, config.tie_word_embeddings = resolve_output(ordered, family.embedding, family.head)
    if described.tied not in (None, config.tie_word_embeddings):
        found = "the embedding" if config.tie_word_embeddings else "a matrix of its own"
        say(
            f"{name}: its configuration has tie_word_embeddings {str(described.tied).lower()}, but by its tensors the "
            f"output matrix is {found}: the tensors count"
        )
    if family.has_row and (experts := _expert_numbers(config, name)) is not None:
        of_family = family.experts
        if file is not None and of_family is not None and (of_family.biased or not of_family.stored):
            source = fused_source(source, family)
        source = experts_source(source, family, experts.count, name)
        source = folded_source(ordered_source(source, family) if file is None else source, family)
    elif file is not None and family.split:
        source = fused_source(source, family)
    shown_name = name.encode("utf-8", "replace").decode()  # the system's names need not be text
    check_stock_model(config, source.shapes, bases, shown_name)
    checkpoint = Checkpoint(shown_name, path, config, family, source, bases, stored.stored_types, _ternary(stored))
    if checkpoint.grid is not None:
        say(f"{name}: {checkpoint.grid}")
    return checkpoint


def _ternary(stored: StoredSource) -> bool:
    """Whether rows of two matrices of blocks hold ternary numbers, where tensors are plain."""
    matrices = [name for name, shape in stored.shapes.items() if len(shape) == 2 and ".layers." in name]
    if not matrices or any(each.quantised for each in stored.stored_types):
        return False
    some = (matrices[len(matrices) // 2], matrices[-1])
    return all(is_ternary(stored.rows(name, 0, min(_TERNARY_ROWS, stored.shapes[name][0]))) for name in some)


def checkpoint_of(model: Checkpoint | str | Path, hashed: bool = True) -> Checkpoint:
    """A checkpoint that is open already, or is opened by its name as `open_checkpoint` does."""
    return model if isinstance(model, Checkpoint) else open_checkpoint(model, hashed)


def _expert_numbers(config: Any, name: str) -> ExpertNumbers | None:
    try:
        return expert_numbers(config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
