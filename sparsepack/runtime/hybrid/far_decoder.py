"""A decoder on a GPU whose memory does not hold all matrices of a model: GPU and processor share those that are far.

    GPU        attention, gate and up, down of the first blocks | first bands of the others, over the bus
    processor                                                   | last bands of the others

Nothing moves between texts: which matrices lie where is planned before loading (`placement/budget.py`), and both sides
leave out the columns that a token skips.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.packed import PackedModel
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.placement.traffic import HitCounts, Traffic, TrafficStats
from sparsepack.progress import format_count
from sparsepack.runtime.cuda.attention.caches import new_cache
from sparsepack.runtime.cuda.attention.kv_cache import NewCache
from sparsepack.runtime.cuda.decoder.mlp_step import Launch, MlpStep
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp, DenseMlp
from sparsepack.runtime.cuda.decoder.sites import CudaSite
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.hybrid.beside import ASSUMED, CudaBesideDecoder, Processor, assumed_links
from sparsepack.runtime.hybrid.far_products import FarMatrix, FarSites, bytes_beside, far_matrices
from sparsepack.runtime.hybrid.handover import HandOver
from sparsepack.runtime.hybrid.placing import links_of
from sparsepack.runtime.options import EngineOptions


class CudaFar:
    """What the matrices of a model of sites share with the processor; see `beside.Shared`.

    far    -- the matrices whose bands are divided; texts: of a step
    blocks -- of the model
    """

    def __init__(
        self, far: Sequence[FarMatrix], blocks: int, hidden: int, texts: int, device: torch.device, kernels: Kernels
    ) -> None:
        self.layout = HandOver(blocks, 0, hidden, texts, tuple(each.asked for each in far))
        self.memory, there = kernels.shared_memory(self.layout.size, device, "the hand-over")
        self._number = torch.zeros(2, dtype=torch.int32, device=device)
        self._waited = torch.zeros(1, dtype=torch.int64, device=device)
        self._sites = FarSites(*(far, self.layout, there, self._number, self._waited, device, kernels), has_lists=False)
        self._loaded = 0

    def load_attention(
        self, sites: Mapping[str, stored.PackedSite], device: torch.device, kernels: Kernels, place: Place
    ) -> dict[str, CudaSite]:
        return self._sites.load(self._loaded, sites, dict.fromkeys(sites, place))

    def load_mlp(
        self, mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place
    ) -> CudaMlp:
        assert isinstance(mlp, stored.DenseMlp)
        sites = self._sites.load(self._loaded, mlp.sites, {"mlp_in": place, "mlp_mid": of_down})
        self._loaded += 1
        return DenseMlp(sites) if self._loaded < self.layout.blocks else LastMlp(sites, self._number)

    @property
    def waited(self) -> float:
        """The seconds that the GPU waited for answers since `begin_text`."""
        return int(self._waited) / 1e9

    def begin_text(self, number: int) -> None:
        self._waited.zero_()
        self._number.fill_(number)

    def keep_traffic(self) -> Tensor:
        return self._waited.clone()

    def forget_step(self, traffic: Tensor) -> None:
        self._waited.copy_(traffic)


@dataclass(frozen=True)
class LastMlp(DenseMlp):
    """The MLP of the last block, behind which the next step has the next number.

    number -- int32 [2], of the step that ran last
    """

    number: Tensor

    def step(self, step: MlpStep, room: None, kernels: Kernels) -> Iterator[Launch]:
        yield from super().step(step, room, kernels)
        yield partial(kernels.count_step, self.number)


class CudaFarDecoder(CudaBesideDecoder):
    """A `CudaBesideDecoder` of a model whose MLPs are stored as sites.

    processor -- what computes beside the GPU
    options   -- links and `sequences`; `threads` are the processor's
    plan      -- what lies where
    measured  -- the links as they were measured on this machine for records as wide as this model

    Without links given or measured, they are those of `beside.ASSUMED`. Raises `UserError` as `CudaBesideDecoder`.
    """

    def __init__(
        self,
        packed: PackedModel,
        processor: Processor,
        device: torch.device,
        context: int,
        cache_type: str,
        options: EngineOptions,
        plan: Plan,
        measured: BandwidthProfile | None = None,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
    ) -> None:
        device = kernels.usable(device)
        record = plan.parts.record
        measured = None if measured is None else measured.of_columns(record)
        self._known = options.links or measured
        assumed = assumed_links(record).of_columns(record)
        links, self._links = links_of(options, measured, (f"as of {ASSUMED}", assumed))
        a, texts = packed.architecture, options.sequences or 1
        self._far = far_matrices(packed, plan, links)
        with kernels.on_device(device):
            shared = CudaFar(self._far, a.layers, a.hidden, texts, device, kernels)
        self._waits = shared
        super().__init__(
            *(packed, device, context, texts, cache_type, kernels, new_cache, plan),
            *(shared, shared.load_mlp),
            lambda: processor.cold_worker(
                *((), shared.memory, shared.layout, options.threads),
                products=[processor.load_zigzag(each.beside) for each in self._far],
            ),
        )
        self._interrupted = False

    @property
    def description(self) -> str:
        plan, blocks = self._plan, self._plan.parts.blocks
        near = {"attention": plan.attention, "gate and up": plan.gates, "down": plan.downs}
        far = [f"{name} of {format_count(blocks - count, 'block')}" for name, count in near.items() if count < blocks]
        far += [] if plan.output else ["the output matrix"]
        return f"{super().description}, in the host's memory {', '.join(far) or 'nothing'}, {self._links}"

    def reset(self) -> None:
        super().reset()
        with self._kernels.on_device(self._device):
            self._count_anew()

    def _begin(self, ids: list[int], sparse: bool) -> None:
        if self._interrupted:
            self._count_anew()
        self._interrupted = True
        super()._begin(ids, sparse)
        self._interrupted = False

    @property
    def traffic_stats(self) -> TrafficStats:
        """Columns of down matrices are counted as neurons with slots are, where they lie."""
        plan, parts, steps = self._plan, self._plan.parts, max(self.stepped, 1)
        active, near = self.active(), {each.block: each for each in self._far if each.name == "mlp_mid"}
        here = over = beside = 0
        for block in range(parts.blocks):
            count = active[block, "mlp_mid"]
            if block < plan.downs:
                here += count
                continue
            shared = near.get(block)
            own = count if shared is None else count * shared.near // len(shared.matrix.blocks)
            over, beside = over + own, beside + count - own
        names = (*ATTENTION_SITES, "mlp_in")
        layers = self._model.layers
        columns = {name: layers[0].attention[name].matrix.columns for name in ATTENTION_SITES}
        columns["mlp_in"] = columns["attn_in"]
        kept = sum(active[block, name] / columns[name] for block in range(parts.blocks) for name in names)
        return TrafficStats(
            Traffic(here, over, beside, waited=self._waits.waited),
            HitCounts(steps, here + over + beside, here),
            plan,
            self._known,
            beside=bytes_beside([each for each in self._far if each.name != "mlp_mid"]),
            kept=kept / (steps * parts.blocks * len(names)),
        )
