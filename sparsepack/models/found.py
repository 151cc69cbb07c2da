"""Families without a row: which Linears of each block read the same tensor, found by running a few tokens through the
stock model on torch's meta device, where nothing has memory and nothing is computed.

That is all that calibrating, thresholds, pruning, tracing and evaluation need to know. Sites are named as those of
`family.SITES` where they are recognisable: what enters and leaves the token mixer of a block (attention, a state-space
layer, a convolution) and its MLP; any other by the first Linear that reads it.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.errors import CheckpointError
from sparsepack.files.stored import shown
from sparsepack.models.blocks import ExpertNumbers, Multipliers
from sparsepack.models.checkpoint.config_files import STOCK_ALONE
from sparsepack.models.families import FAMILIES, REFUSED
from sparsepack.models.family import HEAD, Family
from sparsepack.models.hf_model.attention import masks_of_whole_texts
from sparsepack.models.parts import Experts

TOKENS = 8
_WORKS = "measured, not run by our engines: calibrate, thresholds, prune, trace, eval work"
_MLP = ("mlp", "ffn", "feed_forward", "feedforward", "ff", "moe", "mixer_mlp", "experts", "mlp1", "block_sparse_moe")
"""What the MLP of a block is called, where it is a module of its own."""
_MLP_LINEARS = ("fc1", "fc2", "fc_in", "fc_out", "c_fc", "dense_h_to_4h", "dense_4h_to_h", "linear1", "linear2")
"""What the Linears of an MLP are called that stand in the block itself."""
_MISREAD: Mapping[str, str] = {
    "ctrl": "what stands before its blocks depends on more than the tokens' vectors",
    "inkling2_text": "its blocks hand each other more than hidden states",
}
"""Types whose logits were wrong block by block (`tools/families_page.py` compares them), and why."""
_EXPERTS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")
"""transformers says by these attributes how a module holds experts."""


@dataclass(frozen=True)
class FoundBlock:
    """What was found of a decoder block.

    projections -- site -> the modules that read it, or the parameters of experts, within the block, in the order in
                   which they run
    returns     -- how many values the stock block returns, the hidden states first; 0: these alone
    experts     -- the module that holds experts; None: there is none
    numbers     -- how many experts there are, and how many of them a token has
    """

    projections: Mapping[str, tuple[str, ...]]
    returns: int
    experts: Experts | None = None
    numbers: ExpertNumbers | None = None


@dataclass(frozen=True)
class FoundFamily(Family):
    """A family without a row, by what was found in the stock model of one configuration.

    found     -- of each block
    blocks    -- the name of the list of blocks
    table     -- the name of the embedding's tensor
    output    -- the name of the output matrix
    biased    -- whether that adds a bias
    """

    found: tuple[FoundBlock, ...] = ()
    blocks: str = ""
    table: str = ""
    output: str = HEAD
    biased: bool = False

    @property
    def has_row(self) -> bool:
        return False

    @property
    def embedding(self) -> str:
        return self.table

    @property
    def head(self) -> str:
        return self.output

    def block(self, layer: int | str) -> str:
        return f"{self.blocks}.{layer}"

    def projections_of(self, layer: int) -> Mapping[str, tuple[str, ...]]:
        return self.found[layer].projections

    def experts_of(self, layer: int) -> Experts | None:
        return self.found[layer].experts

    def readers(self, layer: int, site: str) -> tuple[str, ...]:
        experts = self.experts_of(layer)
        names = self.projections_of(layer)[site]
        if experts is None:
            return names
        into, mid = experts.parameters
        return tuple(experts.module if name == into else name for name in names if name != mid)

    def weight(self, projection: str) -> str:
        held = {name for each in self.found if each.experts is not None for name in each.experts.parameters}
        return projection if projection in held else f"{projection}.weight"

    def norm_offset_of(self, name: str) -> float:
        return 0.0


_found: dict[str, FoundFamily] = {}


def family_of_config(config: Any) -> Family:
    """The family of a stock configuration: its row, or what is found in the model. Raises as `find_family`."""
    row = FAMILIES.get(config.model_type)
    if row is not None:
        return row.of(config)
    values = {name: value for name, value in config.to_dict().items() if name not in _OURS}
    key = json.dumps(values, sort_keys=True, default=str)
    if key not in _found:
        _found[key] = find_family(config)
    return _found[key]


_OURS = ("tie_word_embeddings", "max_position_embeddings", "dtype", "transformers_version", "architectures")
"""Fields of a configuration that say nothing of the blocks; the first two are set by what a checkpoint turns out to
be."""


def meta_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The stock causal language model without memory, in eval mode. Raises whatever transformers raises."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # of encoders that may be told to be none
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=dtype, **STOCK_ALONE)
    return model.eval().requires_grad_(False)


def find_family(config: Any) -> FoundFamily:
    """Run a few tokens through the stock model on the meta device and look who reads what.

    Raises `CheckpointError`, saying what is in the way, where the model cannot be taken block by block.
    """
    kind = config.model_type

    def refuse(reason: str) -> CheckpointError:
        row = f": {REFUSED[kind]}" if kind in REFUSED else ""
        return CheckpointError(f"{kind} models are not supported{row}; nor can they be measured: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("an encoder-decoder; expected a decoder alone")
    if kind in _MISREAD:
        raise refuse(_MISREAD[kind])
    if config.get_text_config() is not config:
        raise refuse("a model that takes more than text; expected its text part as a model of its own")
    try:
        model = meta_model(config)
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
    except Exception as error:  # transformers' own code, of any model
        raise refuse(f"its configuration is not understood ({shown(error)})") from error
    names = {id(module): name for name, module in model.named_modules()}
    count = config.num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise refuse(f"no list of its {count} blocks is found")
    if not isinstance(head, nn.Linear) or not isinstance(getattr(table, "weight", None), nn.Parameter):
        raise refuse("its embedding or its output matrix is no single matrix")
    (blocks_name, blocks), *_ = lists
    others = set(getattr(model, "_tied_weights_keys", None) or ()) - {f"{names[id(head)]}.weight"}
    others -= {f"{names[id(head)]}.bias"}
    if others:
        raise refuse(f"weights that parts of it share ({min(others)})")
    watch = _Watch(blocks, head)
    try:
        with watch.hooks(), masks_of_whole_texts(), torch.no_grad():
            logits = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"), use_cache=False).logits
    except Exception as error:  # likewise
        raise refuse(f"its code does not run on the meta device ({shown(error)})") from error
    if watch.refusal:
        raise refuse(watch.refusal)
    scale, cap = _of_logits(watch.probe, logits, refuse)
    found = tuple(watch.block(number, int(config.hidden_size), refuse) for number in range(count))
    return FoundFamily(
        model_type=kind,
        projections=found[0].projections,
        norms={},
        residual=None,
        unrotatable="no row",
        unpackable=REFUSED.get(kind, "no row"),
        multipliers=lambda _: Multipliers(logits=scale, logit_cap=cap),
        found=found,
        blocks=blocks_name,
        table=f"{names[id(table)]}.weight",
        output=f"{names[id(head)]}.weight",
        biased=head.bias is not None,
    )


def told(family: Family) -> str:
    """What is said of a family without a row."""
    return f"{family.model_type} has no row: {_WORKS}"


def _of_logits(probe: Tensor, logits: Tensor, refuse: Callable[[str], CheckpointError]) -> tuple[float, float]:
    """What the stock model makes of the output matrix's products: (factor, cap), cap 0 where it has none."""
    if logits.device.type != "cpu" or logits.shape != probe.shape:
        raise refuse("its logits are more than the product of its output matrix")
    x, y = probe.double().flatten(), logits.double().flatten()
    near = int(x.abs().clamp_min(1e-9).add((x == 0) * 1e9).argmin())
    scale = float(y[near] / x[near])
    if torch.allclose(y, scale * x, rtol=1e-4):
        return (1.0 if abs(scale - 1) < 1e-6 else scale), 0.0
    cap = float(y.abs().max())
    if torch.allclose(y, cap * (scale * x / cap).tanh(), rtol=1e-3, atol=1e-4):
        return (1.0 if abs(scale - 1) < 1e-4 else scale), cap
    raise refuse("its logits are neither a multiple of its output matrix's products nor capped by tanh")


@dataclass
class _Read:
    """A Linear, or a module of experts, that ran: its name within its block, and what it read."""

    name: str
    module: nn.Module
    read: Tensor


@dataclass
class _Watch:
    """Keeps what the Linears and experts of each block read in one run, alive, so that two tensors are never taken for
    one."""

    blocks: nn.ModuleList
    head: nn.Linear
    reads: list[list[_Read]] = field(default_factory=list)
    returns: dict[int, int] = field(default_factory=dict)
    entered: dict[int, Tensor] = field(default_factory=dict)
    used: dict[nn.Module, int] = field(default_factory=dict)
    probe: Tensor = field(default_factory=lambda: torch.empty(0))
    refusal: str = ""

    @contextmanager
    def hooks(self) -> Iterator[None]:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        name = "sparsepack_found"
        ALL_EXPERTS_FUNCTIONS.register(name, self._experts)
        handles, configs = [], []
        for number, block in enumerate(self.blocks):
            self.reads.append([])
            handles.append(block.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True))
            handles.append(block.register_forward_hook(partial(self._leave, number)))
            for within, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    handles.append(module.register_forward_pre_hook(partial(self._see, number, within)))
                    handles.append(module.register_forward_hook(partial(self._forget, number)))
                elif is_experts(module):
                    configs.append((module.config, module.config._experts_implementation))
                    module.config._experts_implementation = name
                    handles.append(module.register_forward_pre_hook(partial(self._see, number, within)))
        handles.append(self.head.register_forward_hook(self._probe))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for config, before in reversed(configs):
                config._experts_implementation = before

    def _experts(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
        self.used[module] = int(chosen.shape[-1])
        return torch.empty_like(hidden)

    def _enter(self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if number in self.entered:
            self.refusal = f"block {number} runs more than once for a token"
        if not isinstance(value, Tensor):
            self.refusal = f"what enters block {number} first is no tensor"
        else:
            self.entered[number] = value

    def _leave(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        self.returns[number] = 0 if isinstance(output, Tensor) else len(output) if isinstance(output, tuple) else -1

    def _see(self, number: int, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            self.reads[number].append(_Read(name, module, inputs[0]))

    def _forget(self, number: int, module: nn.Module, _: Any, output: Any) -> None:
        if not isinstance(output, Tensor):  # a router, built on a Linear
            self.reads[number] = [each for each in self.reads[number] if each.module is not module]

    def _probe(self, module: nn.Linear, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        self.probe = torch.linspace(-30, 30, output.numel()).reshape(output.shape)
        self.probe[..., 0] = 1e6
        return self.probe.clone()

    def block(self, number: int, hidden: int, refuse: Callable[[str], CheckpointError]) -> FoundBlock:
        """What was found of a block."""
        entered = self.entered.get(number)
        if entered is None or self.returns[number] < 0:
            raise refuse(f"block {number} does not run, or returns something else than hidden states")
        if tuple(entered.shape) != (1, TOKENS, hidden):
            raise refuse(f"what enters block {number} is {list(entered.shape)}; expected one stream {hidden} wide")
        groups: list[list[_Read]] = []
        seen: dict[str, None] = {}
        experts: list[_Read] = []
        for each in self.reads[number]:
            if each.name in seen:
                raise refuse(f"{each.name} of block {number} runs more than once for a token")
            seen[each.name] = None
            if is_experts(each.module):
                check_experts(each.module, each.name, refuse)
                experts.append(each)
            group = next((group for group in groups if _same(group[0].read, each.read)), None)
            groups.append([each]) if group is None else group.append(each)
        if len(experts) > 1:
            raise refuse(f"block {number} holds experts in {len(experts)} modules")
        held = experts[0] if experts else None
        groups = [kept for group in groups if (kept := [each for each in group if _is_projection(each, held)])]
        if not groups:
            raise refuse(f"block {number} has no Linear (transformers' Conv1D is none)")
        of_experts = None if held is None else found_experts(held.name, held.module)
        numbers = None
        if held is not None:
            assert of_experts is not None
            module: Any = held.module
            numbers = ExpertNumbers(len(module.down_proj), self.used[module], True, 0)
        return FoundBlock(_named(groups, of_experts), self.returns[number], of_experts, numbers)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts by transformers' interface."""
    return all(hasattr(module, flag) for flag in _EXPERTS) and isinstance(getattr(module, "down_proj", None), Tensor)


def check_experts(module: Any, name: str, refuse: Callable[[str], CheckpointError]) -> None:
    """Raise where experts are held as nothing here reads them."""
    for flag, taken in (("is_transposed", False), ("is_concatenated", True), ("has_bias", False)):
        if getattr(module, flag) != taken:
            raise refuse(f"{name} has {flag} {getattr(module, flag)}; expected {taken}")
    if getattr(module, "has_post_expert_norm", False):
        raise refuse(f"{name} has a norm behind each expert")


def found_experts(name: str, module: Any) -> Experts:
    """How the stock model holds the experts of a module."""
    return Experts(module=name, router="", stored=name, parts=("", "", ""), gated=bool(module.has_gate))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory, seen in any shape with the same last dimension."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape[-1] == other.shape[-1]
        and one.numel() == other.numel()
    )


def _is_projection(read: _Read, experts: _Read | None) -> bool:
    """Whether what read a tensor is one of a site: not a router, what says how much of an expert a token has, or what
    reads something else than one vector of each token. These are left as they are."""
    if not isinstance(read.module, nn.Linear):
        return True
    rows, last = read.module.out_features, read.name.rpartition(".")[2]
    if rows == 1 or read.read.numel() != TOKENS * read.module.in_features:
        return False
    if experts is None or not read.name.startswith(f"{experts.name.rpartition('.')[0]}."):
        return True
    module: Any = experts.module
    return rows != len(module.down_proj) and last not in ("router", "gate", "classifier")


def _is_mlp(name: str) -> bool:
    head, _, rest = name.partition(".")
    return (
        head.strip("_0123456789") in _MLP
        or any(part in head for part in ("mlp", "moe", "ffn", "feed_forward"))
        or (not rest and head in _MLP_LINEARS)
    )


def _named(groups: list[list[_Read]], experts: Experts | None) -> dict[str, tuple[str, ...]]:
    """The sites of a block by their names, in order of execution; what enters the down matrices of experts stands
    behind what all of them are given."""
    of_experts = next((n for n, group in enumerate(groups) if any(is_experts(each.module) for each in group)), None)
    child = [group[0].name.partition(".")[0] for group in groups]
    roles: dict[int, str] = {} if of_experts is None else {of_experts: "mlp_in"}
    inside = "" if of_experts is None or experts is None else experts.module.partition(".")[0]
    mixer = [n for n, group in enumerate(groups) if not _is_mlp(group[0].name) and child[n] != inside]
    mixer = [n for n in mixer if child[n] == child[mixer[0]]]
    channel = [n for n, group in enumerate(groups) if _is_mlp(group[0].name)]
    if mixer:
        roles.setdefault(mixer[0], "attn_in")
        if len(mixer) > 1:
            roles.setdefault(mixer[-1], "attn_out")
    if channel and of_experts is None:
        roles[channel[-1]] = "mlp_mid"
        if len(channel) > 1:
            roles[channel[0]] = "mlp_in"
    sites: dict[str, tuple[str, ...]] = {}
    for number, group in enumerate(groups):
        own = roles.get(number) or _own_name(group[0].name, {*sites, *roles.values()})
        modules = []
        for each in group:
            modules.append(experts.parameters[0] if experts and is_experts(each.module) else each.name)
        sites[own] = tuple(modules)
        if number == of_experts:
            assert experts is not None
            sites["mlp_mid"] = (experts.parameters[1],)
    return sites


def _own_name(name: str, taken: set[str]) -> str:
    """A name for a site by the Linear that reads it: the shortest end of its name that is not taken."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        own = "_".join(parts[-count:])
        if own not in taken:
            return own
    return f"{own}_{len(taken)}"
