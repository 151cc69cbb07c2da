"""An artifact under evaluation as its users run it: by the engine, its kernels and its own rounding included."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sparsepack.errors import UserError
from sparsepack.eval.protocols import CountingScorer, Done, Logits, Subject, TokensRead, ignored
from sparsepack.formats.manifest import source_made_from
from sparsepack.formats.open import is_artifact, open_artifact, read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import stock_tokenizer
from sparsepack.formats.table import FORMATS, those_with
from sparsepack.models.activity import sparse_sites_of
from sparsepack.models.sites import SiteKey
from sparsepack.placement.traffic import HitCounts
from sparsepack.progress import say
from sparsepack.runtime.backends import backend_for, find_backend
from sparsepack.runtime.decoder import GivenTokens
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions
from sparsepack.workers.exchange import AllGather


class EngineScorer(CountingScorer):
    """A scorer by an engine: sparse positions are decoded as `Engine.teacher_forced` does it, of several rows together
    where the backend can, with what they begin with alike computed once."""

    def __init__(self, packed: PackedModel, options: EngineOptions) -> None:
        self.context, self.vocabulary = packed.architecture.context, packed.architecture.vocabulary
        self.device = torch.device(options.device)
        self._packed, self._options = packed, options
        row = find_backend(options.backend or backend_for(options.device).name)
        self._scores_rows = row.scores_rows and not options.hold
        self._together = row.sequences if self._scores_rows else 1
        self._engine: Engine | None = None
        self._hit_counts: HitCounts | None = None
        self.tokens_read = TokensRead(packed.attention, packed.architecture.sliding_windows)
        self.reset()

    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
        scored_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits themselves, [B, S, V]: an engine does not show what enters its output matrix."""
        count, width = input_ids.shape
        self.tokens_read.count(width, lengths, sparse_from)
        stops = [width] * count if lengths is None else lengths.tolist()
        starts = [0] * count if scored_from is None else scored_from.tolist()
        rows = [
            GivenTokens(ids[:stop], min(sparse, stop), start)
            for ids, stop, sparse, start in zip(input_ids.tolist(), stops, sparse_from.tolist(), starts, strict=True)
        ]
        if self.device.type == "cpu":  # memory of zeros is taken when it is written: what is not scored takes none
            logits = torch.from_numpy(np.zeros((count, width, self.vocabulary), np.float32))
        else:
            logits = torch.zeros(count, width, self.vocabulary, device=self.device)
        for first in range(0, count, self._together):
            part = rows[first : first + self._together]
            for number, scored in enumerate(self._scored(part), first):
                logits[number, starts[number] : stops[number]] = scored
            done(len(part))
        return logits

    def head(self, words: slice) -> Logits:
        """`hidden` are the logits already."""
        return lambda logits: logits[..., words]

    def _scored(self, rows: Sequence[GivenTokens]) -> list[torch.Tensor]:
        """The logits of each row that are scored."""
        engine = self._load_decoder(max(len(row.ids) for row in rows), len(rows))
        if self._scores_rows:
            logits = engine.teacher_forced_rows(rows)
        else:
            (row,) = rows
            logits = [engine.teacher_forced(row.ids, row.sparse_from)[row.scored_from :]]
        decoded = sum(len(row.ids) - row.sparse_from for row in rows)
        self._decoded += decoded
        if engine.hit_counts is not None:
            self._hit_counts = (self._hit_counts or HitCounts()) + engine.hit_counts
        for key, share in engine.activity().items():
            self._inactive[key] = self._inactive.get(key, 0.0) + (1 - share) * decoded
        return logits

    def _load_decoder(self, positions: int, sequences: int) -> Engine:
        """The engine. One that is too small gives way to one at least twice its size before that is loaded: rows of a
        task grow by little, and two would hold the model twice."""
        before = 0 if self._engine is None else self._engine.context
        sequences = max(sequences, 0 if self._engine is None else len(self._engine.positions))
        if self._engine is None or before < positions or len(self._engine.positions) < sequences:
            first, self._engine = self._engine is None, None
            context = before if before >= positions else min(self.context, max(positions, 2 * before))
            self._engine = Engine(self._packed, self._options, context=context, sequences=sequences)
            if first:
                say(f"runtime: {self._engine.description}", *self._engine.notes)
        return self._engine

    def reset(self) -> None:
        self.tokens_read.reset()
        self._decoded = 0
        self._hit_counts = None
        self._inactive: dict[SiteKey, float] = {}

    def share(self, all_gather: AllGather) -> None:
        """An engine is measured by one process: see `EvalRequest.check_workers`."""

    @property
    def hit_counts(self) -> HitCounts | None:
        return self._hit_counts

    def realised(self) -> dict[SiteKey, float]:
        """The share of inactive neurons is there, too, where MLPs are stored by neurons."""
        sparse = self._packed.rules.keys()
        return {
            (layer, name): inactive / self._decoded
            for (layer, name), inactive in self._inactive.items()
            if (layer, name) in sparse or name in self._packed.mlp_kind.exact
        }


@dataclass(frozen=True, kw_only=True)
class EngineSubject(Subject):
    """A subject that an engine runs."""

    skips_neurons = True

    packed: PackedModel
    options: EngineOptions

    @property
    def sparse(self) -> bool:
        return self.packed.skips

    @property
    def precision(self) -> dict[str, str]:
        """The engine chooses the type of the arithmetic."""
        return {"weights": FORMATS[self.kind].matrices.block, "dtype": "the runtime's own"}

    def scorer(self) -> EngineScorer:
        return EngineScorer(self.packed, self.options)

    def task_scorer(self) -> EngineScorer:
        return self.scorer()

    def parameters(self) -> Mapping[SiteKey, int]:
        return self.packed.parameters


def open_engine_subject(name: str, options: EngineOptions) -> EngineSubject:
    """Open an artifact to be run by the backend that the options name. Raises `UserError` for what no engine runs, and
    for slots that the backend or the artifact does not know."""
    backend = options.backend or backend_for(options.device).name
    path = Path(name)
    if not is_artifact(path) or not open_artifact(path).format.runs:
        formats = those_with("runs")
        raise UserError(f"{name}: --backend {backend} runs {formats} artifacts; pack the model first, or leave it out")
    packed = read_packed(path)
    check_features(find_backend(backend), options, packed)
    return EngineSubject(
        name=name,
        kind=str(packed.manifest["kind"]),
        tokenizer=stock_tokenizer(packed),
        end_tokens=packed.architecture.eos,
        context=packed.architecture.context,
        source_sha256=str(packed.manifest["model"]["sha256"]),
        made_from=source_made_from(packed.manifest),
        sparsity=packed.sparsity,
        sparse_sites=sparse_sites_of(packed.manifest, packed.rules),
        attention=packed.attention,
        packed=packed,
        options=options,
    )
