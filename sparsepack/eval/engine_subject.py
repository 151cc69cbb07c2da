"""An artifact under evaluation as its users run it: by the engine, its kernels and its own rounding included."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.eval.protocols import Done, Logits, ignored
from sparsepack.eval.tokens_read import TokensRead
from sparsepack.formats.manifest import pruned_from
from sparsepack.formats.open import is_artifact, open_artifact, read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import stock_tokenizer, target_sparsity
from sparsepack.formats.table import FORMATS, those_with
from sparsepack.models.records.rule import SiteKey
from sparsepack.models.records.skipped import sparse_sites_of
from sparsepack.models.records.sparse_attention import SparseAttention
from sparsepack.placement.counts import HitCounts
from sparsepack.progress import say
from sparsepack.runtime.backends import backend_for, backend_named
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions


class EngineScorer:
    """An `eval.scorer.SparseScorer` by an engine: sparse positions are decoded as `Engine.teacher_forced` does it."""

    steps = 1

    def __init__(self, packed: PackedModel, options: EngineOptions) -> None:
        self.context, self.vocabulary = packed.architecture.context, packed.architecture.vocabulary
        self.device = torch.device(options.device)
        self._packed, self._options = packed, options
        self._engine: Engine | None = None
        self._served: HitCounts | None = None
        self.tokens_read = TokensRead(packed.attention, packed.architecture.sliding_windows)
        self.reset()

    def rows_at_once(self, width: int, batch: int) -> int:
        """See `eval.protocols.WindowScorer`."""
        return batch

    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
    ) -> torch.Tensor:
        """The logits themselves, [B, S, V]: an engine does not show what enters its output matrix."""
        width = input_ids.shape[1]
        self.tokens_read.count(width, lengths, sparse_from)
        real = torch.full((len(input_ids),), width) if lengths is None else lengths
        logits = torch.zeros(*input_ids.shape, self.vocabulary, device=self.device)
        for row, (ids, length, start) in enumerate(zip(input_ids, real.tolist(), sparse_from.tolist(), strict=True)):
            logits[row, :length] = self._teacher_forced(ids[:length].tolist(), min(start, length))
            done(1)
        return logits

    def head(self, words: slice) -> Logits:
        """`hidden` are the logits already."""
        return lambda logits: logits[..., words]

    def logits(self, input_ids: torch.Tensor, lengths: torch.Tensor, sparse_from: torch.Tensor) -> torch.Tensor:
        """Next-token logits [B, S, V] of right-padded rows; see `eval.protocols.Scorer`."""
        return self.hidden(input_ids, lengths, sparse_from)

    def _teacher_forced(self, ids: list[int], sparse_from: int) -> torch.Tensor:
        engine = self._with_room(len(ids))
        logits = engine.teacher_forced(ids, sparse_from)
        decoded = len(ids) - sparse_from
        self._decoded += decoded
        if engine.served is not None:
            self._served = (self._served or HitCounts()) + engine.served
        for key, share in engine.activity().items():
            self._inactive[key] = self._inactive.get(key, 0.0) + (1 - share) * decoded
        return logits

    def _with_room(self, positions: int) -> Engine:
        """The engine. One that is too small gives way to one at least twice its size before that is loaded: rows of a
        task grow by little, and two would hold the model twice."""
        before = 0 if self._engine is None else self._engine.context
        if self._engine is None or before < positions:
            self._engine = None
            context = min(self.context, max(positions, 2 * before))
            self._engine = Engine(self._packed, self._options, context=context)
            if not before:
                say(f"runtime: {self._engine.description}", *self._engine.notes)
        return self._engine

    def reset(self) -> None:
        """Forget the counts."""
        self.tokens_read.reset()
        self._decoded = 0
        self._served = None
        self._inactive: dict[SiteKey, float] = {}

    @property
    def served(self) -> HitCounts | None:
        """What slots served of all sparse positions so far; None where nobody has slots."""
        return self._served

    def realised(self) -> dict[SiteKey, float]:
        """Share of inactive channels per sparse site, and of inactive neurons where MLPs are stored by them, over all
        sparse positions so far; empty before the first."""
        sparse = self._packed.rules.keys()
        return {
            (layer, name): inactive / self._decoded
            for (layer, name), inactive in self._inactive.items()
            if (layer, name) in sparse or name in self._packed.mlp_kind.exact
        }


@dataclass(frozen=True)
class EngineSubject:
    """An `eval.subject.Subject` that an engine runs."""

    name: str
    packed: PackedModel
    options: EngineOptions
    tokenizer: Any

    @property
    def kind(self) -> str:
        return str(self.packed.manifest["kind"])

    @property
    def source_sha256(self) -> str:
        return str(self.packed.manifest["model"]["sha256"])

    @property
    def pruned_from(self) -> str | None:
        return pruned_from(self.packed.manifest)

    @property
    def target_sparsity(self) -> float:
        return target_sparsity(self.packed)

    @property
    def sparse_sites(self) -> Collection[Any]:
        """(layer, site) of those that may be sparse."""
        return sparse_sites_of(self.packed.manifest, self.packed.rules)

    @property
    def context(self) -> int:
        """Positions the model was made for."""
        return self.packed.architecture.context

    @property
    def sparse(self) -> bool:
        """Whether any site, any attention or any MLP skips anything."""
        return self.packed.skips

    @property
    def attention(self) -> SparseAttention | None:
        """Which tokens decoded positions read; None: all."""
        return self.packed.attention

    def scorer(self) -> EngineScorer:
        """A scorer over the engine, counts at zero."""
        return EngineScorer(self.packed, self.options)

    def task_scorer(self) -> EngineScorer:
        """What scores the rows of tasks, counts at zero."""
        return self.scorer()

    @property
    def precision(self) -> dict[str, str]:
        """For results: the type of the matrices as `weights`, and who chooses that of the arithmetic as `dtype`."""
        return {"weights": FORMATS[self.kind].matrices, "dtype": "the runtime's own"}

    def parameter_shares(self) -> Mapping[SiteKey, float]:
        """Each site's share of the parameters of all sites."""
        sizes = self.packed.parameters
        total = sum(sizes.values())
        return {key: size / total for key, size in sizes.items()}


def open_engine_subject(name: str, options: EngineOptions) -> EngineSubject:
    """Open an artifact to be run by the backend that the options name. Raises `UserError` for what no engine runs, and
    for slots that the backend or the artifact does not know."""
    backend = options.backend or backend_for(options.device).name
    path = Path(name)
    if not is_artifact(path) or not open_artifact(path).format.runs:
        formats = those_with("runs")
        raise UserError(f"{name}: --backend {backend} runs {formats} artifacts; pack the model first, or leave it out")
    packed = read_packed(path)
    check_features(backend_named(backend), options, packed)
    return EngineSubject(name, packed, options, stock_tokenizer(packed))
