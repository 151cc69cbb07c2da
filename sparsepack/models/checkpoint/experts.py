"""The experts of a checkpoint under the names of the stock model, which has those of a block in two tensors.

Most checkpoints have three matrices for each expert, a GGUF three tensors for those of a block, a few what the stock
model has. Here the second form is called parts: gate, up and down of all experts of a block, each [experts, rows,
columns], by the names `PARTS` within the module.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.sources import Entries, MadeSource, TensorSource, entries_of
from sparsepack.models.family import MLP_MID, Family
from sparsepack.models.parts import Experts

PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_BIASES = ("gate_proj.bias", "up_proj.bias", "down_proj.bias")
_BIAS = "_bias"
_OF_PARAMETERS = {
    Experts.GATE_UP: PARTS[:2],
    Experts.UP: PARTS[1:2],
    Experts.DOWN: PARTS[2:],
    f"{Experts.GATE_UP}{_BIAS}": _BIASES[:2],
    f"{Experts.DOWN}{_BIAS}": _BIASES[2:],
}
"""A parameter of experts -> the parts that it is made of, whose rows it has one after the other: of matrices [experts,
rows, columns], of biases [experts, rows]."""

Shape = tuple[int, ...]


def as_experts(site: str, weights: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """The matrices of a shared expert at a site as those of experts of this width: [experts, rows, columns].

    weights -- gate and up, or up alone, [experts * width, hidden] at mlp_in, down [hidden, experts * width] at mlp_mid
    """
    if site == MLP_MID:
        return torch.unflatten(weights[0], 1, (-1, width)).transpose(0, 1)
    return torch.cat([torch.unflatten(weight, 0, (-1, width)) for weight in weights], 1)


def as_shared(site: str, experts: torch.Tensor, parts: int = 2) -> list[torch.Tensor]:
    """The inverse of `as_experts`; parts -- matrices at mlp_in."""
    if site == MLP_MID:
        return [experts.transpose(0, 1).flatten(1)]
    return [weight.flatten(0, 1) for weight in experts.chunk(parts, 1)]


def part_shapes(family: Family, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Name and shape of the parts that the stock model's tensors `shapes` are made of: of experts, and of projections
    that llama.cpp has apart (`Family.split`)."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        module, of = _parameter(family, name)
        for part in of:
            found[f"{module}.{part}"] = _times(shape, part, 1, len(of))
    return found


def _rows(part: str) -> int:
    """The dimension of a part that its rows are in."""
    return -1 if part.endswith(".bias") else -2


def _times(shape: Shape, part: str, times: int, parts: int = 1) -> Shape:
    """A shape with so many times the rows, divided by `parts`."""
    changed = list(shape)
    changed[_rows(part)] = times * changed[_rows(part)] // parts
    return tuple(changed)


def part_tensor(family: Family, name: str, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A part by its name, or any other tensor, of a model whose tensors `tensor` gives by the stock model's names."""
    whole = _whole(family, name)
    if whole == name:
        return tensor(name)
    module, of = _parameter(family, whole)
    part = name.removeprefix(f"{module}.")
    return tensor(whole).chunk(len(of), _rows(part))[of.index(part)]


def _whole(family: Family, name: str) -> str:
    """The tensor of the stock model that a part is of; any other tensor itself."""
    module, _, part = name.rpartition(".experts.") if family.experts else ("", "", "")
    other = Experts.UP if family.experts is None or family.experts.gated else Experts.GATE_UP
    for parameter, parts in _OF_PARAMETERS.items():
        if part in parts and parameter != other:
            return f"{module}.experts.{parameter}"
    for projection, parts in family.split.items():
        module, _, last = name.removesuffix(".weight").rpartition(".")
        if last in parts and f".{module}".endswith(f".{projection.rpartition('.')[0]}"):
            return f"{module}.{projection.rpartition('.')[2]}.weight"
    return name


def fused_tensor(family: Family, name: str, part: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The inverse of `part_tensor`: a tensor by the stock model's name, where `part` gives the parts, and all that is
    no expert's."""
    module, of = _parameter(family, name)
    return torch.cat([part(f"{module}.{each}") for each in of], _rows(of[0])) if of else part(name)


def fused_source(source: TensorSource, family: Family) -> TensorSource:
    """A source of a GGUF whose split projections and experts are whole, as the stock model has them but for the order
    of experts (`ordered_source`)."""
    entries: dict[str, tuple[torch.dtype, Shape]] = {}
    for name, (dtype, shape) in entries_of(source).items():
        whole = _whole(family, name)
        entries[whole] = dtype, shape if whole == name else _times(shape, name, len(_parameter(family, whole)[1]))
    return MadeSource(source, entries, lambda name: fused_tensor(family, name, source.tensor))


def _parameter(family: Family, name: str) -> tuple[str, tuple[str, ...]]:
    """The module of a parameter of experts or of a split projection, by its name, and the parts that it is made of;
    none of other tensors."""
    module, _, parameter = name.rpartition(".")
    for projection, parts in family.split.items():
        if f".{module}".endswith(f".{projection}") and parameter == "weight":
            return module.rpartition(".")[0], tuple(f"{part}.weight" for part in parts)
    if family.experts is None or not module.endswith(f".{family.experts.module}"):
        return module, ()
    return module, _OF_PARAMETERS.get(parameter, ())


def experts_source(source: TensorSource, family: Family, count: int, name: str) -> MadeSource:
    """A source whose experts are stored in any of the three forms, under the stock model's names.

    count -- of experts, as the configuration says; name -- of the checkpoint, for messages

    Raises `CheckpointError` where an expert is missing, or is of another shape or type than the others of its block.
    """
    assert family.experts is not None
    all_stored, joined = entries_of(source), _Joined(source, count, name, family.experts.gated)
    entries: dict[str, tuple[torch.dtype, Shape]] = {}
    renamed: dict[str, str] = {}
    apart: dict[str, dict[str, dict[int, str]]] = {}  # module, part, expert
    for stored, expert, module, part in _placed(source, family):
        if part is None:
            renamed[module], entries[module] = stored, all_stored[stored]
        else:
            apart.setdefault(module, {}).setdefault(part, {})[expert] = stored
    for module, parts in apart.items():
        entries |= joined.join(module, parts)

    def tensor(one: str) -> torch.Tensor:
        return source.tensor(renamed[one]) if one in renamed else joined.tensor(one)

    def slices(one: str) -> Iterable[torch.Tensor]:
        return tensor(one) if one in renamed else joined.slices(one)

    return MadeSource(source, entries, tensor, slices)


def apart_source(source: TensorSource, family: Family) -> TensorSource:
    """The inverse of `experts_source`: a source of a checkpoint as most have it, three matrices for each expert. A
    source without experts is as it is.

    The two tensors of a block from which they are taken are held until those of another one are asked for.
    """
    experts = family.experts
    if experts is None or not experts.stored:
        return source
    if experts.alternate:
        return ordered_source(source, family, stored=True)
    home, _, last = experts.module.rpartition(".")
    names = dict(zip(PARTS, (f"{part}.weight" for part in experts.parts), strict=True))
    entries: dict[str, tuple[torch.dtype, Shape]] = {}
    places: dict[str, tuple[str, int, int]] = {}  # the stock model's tensor, the part of it, the expert; -1: all
    held: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in entries_of(source).items():
        module, of = _parameter(family, name)
        block = re.match(re.escape(family.block("")) + r"\d+\.", name)
        begins = f"{block[0]}{home}." if block else ""
        if not of:
            inside = begins and name.startswith(begins)
            stored = f"{block[0]}{experts.stored}.{name.removeprefix(begins)}" if block and inside else name
            entries[stored], places[stored] = (dtype, shape), (name, 0, -1)
        for number, part in enumerate(of):
            for expert in range(shape[0]):
                stored = f"{module.removesuffix(experts.module)}{experts.stored}.{last}.{expert}.{names[part]}"
                entries[stored] = dtype, (shape[1] // len(of), shape[2])
                places[stored] = name, number, expert

    def tensor(stored: str) -> torch.Tensor:
        name, number, expert = places[stored]
        if expert < 0:
            return source.tensor(name)
        module, of = _parameter(family, name)
        if name not in held:
            for other in [each for each in held if _parameter(family, each)[0] != module]:
                del held[other]
            held[name] = source.tensor(name)
        return held[name][expert].chunk(len(of))[number].contiguous()

    return MadeSource(source, entries, tensor)


def ordered_source(source: TensorSource, family: Family, stored: bool = False) -> TensorSource:
    """A source whose experts are in the order of other families, of one in the order of the stock model (`alternate`);
    the other way round where the other is wanted, `stored`. A source of a family with one order is as it is."""
    experts = family.experts
    if experts is None or not experts.alternate:
        return source
    ends = tuple(f".{parameter}{bias}" for parameter in experts.parameters for bias in ("", "_bias"))

    def tensor(name: str) -> torch.Tensor:
        value = source.tensor(name)
        if not name.endswith(ends):
            return value
        in_turns = name.removesuffix("_bias").endswith(Experts.GATE_UP)
        rows = value if name.endswith("_bias") or stored else value.mT  # of biases [experts, rows]
        if in_turns and stored:
            rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
        elif in_turns:
            rows = torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
        return (rows.mT if stored and not name.endswith("_bias") else rows).contiguous()

    entries = {
        name: (dtype, (shape[0], *shape[:0:-1]) if name.endswith(ends) else shape)
        for name, (dtype, shape) in entries_of(source).items()
    }
    return MadeSource(source, entries, tensor)


def folded_source(source: TensorSource, family: Family) -> TensorSource:
    """A source whose shared experts and routers read the stream by the norm of the others (`parts.OwnNorms`); the rest
    of theirs is in their matrices, in float32. A source of a family without such norms is as it is.

    Where the norm is zero the rest has no place: the norm becomes one there, and the others' matrices zero.
    """
    experts = family.experts
    if experts is None or experts.own_norms is None or experts.shared is None:
        return source
    norm = family.norms["mlp_norm"]
    own, into = experts.own_norms.shared, (experts.parameters[0], *experts.shared.projections[0])
    router, channels = experts.router, experts.own_norms.channels
    block = re.compile(re.escape(family.block("")) + r"\d+\.")

    def tensor(name: str) -> torch.Tensor:
        within = block.match(name)
        if within is None:
            return source.tensor(name)
        begins = within[0]
        last = name.removeprefix(begins).removesuffix(".weight")
        if last not in (norm, own, router, channels, *into):
            return source.tensor(name)
        stored = source.tensor(f"{begins}{norm}.weight")
        of_others: torch.Tensor = torch.where(stored == 0, 1, stored)
        if last in (norm, own):
            return of_others
        if last == into[0]:
            value: torch.Tensor = source.tensor(name)
            return value.masked_fill(stored == 0, 0) if (stored == 0).any() else value
        if last == channels:
            return of_others.float() * math.sqrt(len(of_others))
        if last == router:
            reads = source.tensor(f"{begins}{channels}").float() / math.sqrt(len(of_others))
        else:
            reads = source.tensor(f"{begins}{own}.weight").float()
        return source.tensor(name).float() * reads.div(of_others.float())

    def slices(name: str) -> Iterable[torch.Tensor]:
        if isinstance(source, MadeSource) and not name.endswith(f".{into[0]}"):
            return source.slices(name)
        return tensor(name)

    ends = (*(f".{module}.weight" for module in (router, *into[1:])), f".{channels}")
    entries = {
        name: (torch.float32 if name.endswith(ends) else dtype, shape)
        for name, (dtype, shape) in entries_of(source).items()
    }
    return MadeSource(source, entries, tensor, slices)


def _placed(source: TensorSource, family: Family) -> Iterator[tuple[str, int, str, str | None]]:
    """Find the expert, the module and the part that each stored tensor is of, after its name; the expert is -1 where it
    has all of them. The part is None where it is no expert's, and the module then its name in the stock model."""
    experts = family.experts
    assert experts is not None
    if not experts.stored:
        yield from ((stored, -1, stored, None) for stored in source.shapes)
        return
    inside = re.compile(rf"({re.escape(family.block(''))}\d+)\.{re.escape(experts.stored)}\.(.+)")
    own = dict(zip((f"{part}.weight" for part in experts.parts), PARTS, strict=True))
    home, _, last = experts.module.rpartition(".")
    for stored in source.shapes:
        found = inside.fullmatch(stored)
        if found is None:
            within = re.fullmatch(rf"(.+\.{re.escape(experts.module)})\.(.+)", stored)
            if within and within[2] in PARTS:  # of a GGUF
                yield stored, -1, within[1], within[2]
            else:
                yield stored, -1, stored, None
            continue
        block, rest = found[1], found[2]
        one = re.fullmatch(rf"{last}\.(?:(\d{{1,9}})\.)?(.+)", rest)
        if one and one[1] is not None and one[2] in own:
            yield stored, int(one[1]), f"{block}.{experts.module}", own[one[2]]
        elif one and one[1] is None and one[2] in PARTS:
            yield stored, -1, f"{block}.{experts.module}", one[2]
        else:
            yield stored, -1, f"{block}.{home}.{rest}", None


class _Joined:
    """The stock model's tensors out of those of single experts, or of all experts' parts."""

    def __init__(self, source: TensorSource, count: int, name: str, gated: bool) -> None:
        self._source, self._count, self._name = source, count, name
        self._into = (Experts.GATE_UP, PARTS[:2]) if gated else (Experts.UP, PARTS[1:2])
        self._pieces: dict[str, list[list[str]]] = {}  # of each fused tensor: of each part, its tensors in the source
        self._entries: dict[str, tuple[torch.dtype, Shape]] = {}

    def join(self, module: str, parts: Mapping[str, Mapping[int, str]]) -> Entries:
        for parameter, of in (self._into, (Experts.DOWN, PARTS[2:])):
            pieces = [self._tensors(module, part, parts.get(part, {})) for part in of]
            name, all_of = f"{module}.{parameter}", [piece for part in pieces for piece in part]
            shapes = {self._source.shapes[piece] for piece in all_of}
            dtypes = {self._source.dtypes[piece] for piece in all_of}
            if len(shapes) > 1 or len(dtypes) > 1:
                other = next(
                    piece
                    for piece in all_of
                    if self._source.shapes[piece] != self._source.shapes[all_of[0]]
                    or self._source.dtypes[piece] != self._source.dtypes[all_of[0]]
                )
                raise CheckpointError(
                    f"{self._name}: {other} is {self._described(other)}, {all_of[0]} is {self._described(all_of[0])}; "
                    "expected all experts of a block alike"
                )
            shape = next(iter(shapes))[-2:]
            if len(shape) != 2:
                raise CheckpointError(f"{self._name}: {all_of[0]} is {self._described(all_of[0])}; expected a matrix")
            self._pieces[name] = pieces
            self._entries[name] = next(iter(dtypes)), (self._count, len(of) * shape[0], shape[1])
        return {name: self._entries[name] for name in (f"{module}.{self._into[0]}", f"{module}.{Experts.DOWN}")}

    def _described(self, stored: str) -> str:
        return f"{str(self._source.dtypes[stored]).removeprefix('torch.')} {list(self._source.shapes[stored])}"

    def _tensors(self, module: str, part: str, found: Mapping[int, str]) -> list[str]:
        """The tensors of a part, one of all experts or one of each."""
        if found.keys() == {-1}:
            if self._source.shapes[found[-1]][0] != self._count:
                raise CheckpointError(
                    f"{self._name}: {found[-1]} is {self._described(found[-1])}, its configuration means {self._count} "
                    "experts; weights and config.json do not belong together"
                )
            return [found[-1]]
        expected = set(range(self._count))
        if found.keys() != expected:
            missing = sorted(expected - found.keys())
            what = f"{part} of expert {missing[0]} is missing" if missing else f"{found[max(found)]} is one too many"
            raise CheckpointError(
                f"{self._name}: {module}: {what}, its configuration means {self._count} experts; weights and "
                "config.json do not belong together"
            )
        return [found[expert] for expert in range(self._count)]

    def slices(self, name: str) -> Iterable[torch.Tensor]:
        """The matrices of a tensor one by one, read when their turn comes where each expert has its own."""
        pieces = self._pieces[name]
        if len(self._source.shapes[pieces[0][0]]) == 3:  # all experts' in one
            return self.tensor(name)
        of_each = zip(*pieces, strict=True)
        return (torch.cat([self._source.tensor(stored) for stored in of_expert]) for of_expert in of_each)

    def tensor(self, name: str) -> torch.Tensor:
        pieces, (dtype, shape) = self._pieces[name], self._entries[name]
        whole = torch.empty(shape, dtype=dtype)
        for of_part, into in zip(pieces, whole.chunk(len(pieces), 1), strict=True):
            for expert, stored in enumerate(of_part):  # one more of them in memory, not one more copy of all
                value = self._source.tensor(stored)
                (into if value.dim() == 3 else into[expert]).copy_(value)
        return whole
