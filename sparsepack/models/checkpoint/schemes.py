"""How quantised releases store a matrix: a row of `SCHEMES` and a decoder for each scheme, in plain torch.

A matrix is stored in several tensors, which are known by the ends of their names. An end that begins with a dot stands
in place of the `.weight` of the matrix, any other follows its whole name; the empty one is the matrix's name itself.
Of `q_proj.weight` the end `_scale` is `q_proj.weight_scale`, `.qzeros` is `q_proj.qzeros`.

Decoded weights have the values that the release's own programs multiply by before these round them, in a type in which
they are exact or nearly so: float32, since a code times a scale of 8 bits and more does not fit 16 bits.

Sources: transformers 5.23 (integrations/finegrained_fp8.py, mxfp4.py, bitnet.py), compressed-tensors 0.20
(compressors), AutoAWQ (WQLinear_GEMM), AutoGPTQ and GPTQModel (qlinear), bitsandbytes (functional.py, QuantState),
NVIDIA ModelOpt. compressed-tensors itself, which rounds to the type of the scales, is what tests compare with.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepack.files.stored import Name, Size, Stored, validate
from sparsepack.models.checkpoint.codes import Shape, by_blocks, decoded, floats, numbers, of_blocks, scales, unpacked

Tensors = Mapping[str, Tensor]
"""The stored tensors of a matrix, by the ends of their names."""

_MX = 32
"""So many neighbours share a scale in the microscaling formats, MXFP4, MXFP6 and MXFP8."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each 4 bits of a word are of, among 8 neighbours, beginning with the lowest."""


class Misfit(ValueError):
    """A stored tensor that does not fit the others of its matrix, by its end, and what is said of it."""

    def __init__(self, end: str, said: str) -> None:
        super().__init__(said)
        self.end = end


class Settings(Stored):
    """`quantization_config` of a config.json, as far as decoders ask for it."""

    quant_method: Name
    format: Name | None = None
    packing_format: Name | None = None
    checkpoint_format: Name | None = None
    version: Name | None = None
    bits: Size | None = None
    w_bit: Size | None = None
    dynamic: dict[str, Any] | bool | None = None
    weight_block_size: list[Size] | None = None
    config_groups: dict[str, Any] | None = None
    linear_class: Name | None = None
    quantization_mode: Name | None = None
    use_rms_norm: bool = False
    modules_to_not_convert: list[Name] | None = None

    def rounds(self, name: str) -> bool:
        """Whether a matrix that is stored as plain numbers is rounded to ternary ones before it multiplies."""
        if self.quant_method != "bitnet" or self.quantization_mode != "online":
            return False
        kept = any(module in name for module in self.modules_to_not_convert or ())
        return ".layers." in name and name.endswith("_proj.weight") and not kept

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """How many rows and columns of a matrix share a scale, by what the configuration names; several where matrices
        differ."""
        found: list[Any] = [self.weight_block_size] if self.weight_block_size else []
        for group in (self.config_groups or {}).values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                found += [weights.get("block_structure"), [1, weights.get("group_size")]]
        pairs = [each for each in found if isinstance(each, list) and len(each) == 2]
        return [(rows, columns) for rows, columns in pairs if type(rows) is type(columns) is int and rows * columns > 0]


@dataclass(frozen=True)
class Scheme:
    """How a matrix is stored.

    name    -- as users know it
    methods -- the values of `quant_method` under which it occurs
    codes   -- end of the tensor with the weights' codes, and `types`, those that it may have (safetensors' names)
    beside  -- ends of the other tensors that there must be; `more`: of those that there may be
    shape   -- of the matrix, from shapes of the stored tensors, from those in `read`, and the settings; raises `Misfit`
    decode  -- the matrix, from the stored tensors, its shape and the settings
    read    -- ends of small tensors that must be read for the shape
    dtype   -- of decoded weights
    """

    name: str
    methods: tuple[str, ...]
    codes: str
    types: tuple[str, ...]
    beside: tuple[str, ...]
    shape: Callable[[Mapping[str, Shape], Tensors, Settings], Shape]
    decode: Callable[[Tensors, Shape, Settings], Tensor]
    more: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def matrix(self, stored: str) -> str | None:
        """The name of the matrix whose codes a tensor of this name may have; None: of none."""
        module = stored.removesuffix(self.codes)
        return None if not stored.endswith(self.codes) else module + ".weight" * self.codes.startswith(".")


def stored_name(matrix: str, end: str) -> str:
    """The name of a stored tensor of a matrix."""
    return matrix.removesuffix(".weight") + end if end.startswith(".") else matrix + end


def _scale_of(stored: Mapping[str, Any]) -> str:
    return "_scale_inv" if "_scale_inv" in stored else "_scale"


def _shape_of_numbers(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    """Every number is a weight; they have scales by blocks."""
    scale = _scale_of(shapes)
    for end in (scale, *(["_zero_point"] if "_zero_point" in shapes else [])):
        _checked(end, shapes[""], shapes[end], settings)
    return shapes[""]


def _checked(end: str, shape: Shape, numbers: Shape, settings: Settings) -> Shape:
    try:
        of_blocks(shape, numbers, settings.blocks)
    except ValueError as error:
        raise Misfit(end, str(error)) from None
    return shape


def _decode_numbers(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    values = numbers(stored[""])
    if "_zero_point" in stored:
        by_blocks(values, stored["_zero_point"].float(), settings.blocks, Tensor.sub_)
    return by_blocks(values, scales(stored[_scale_of(stored)]), settings.blocks, Tensor.mul_)


def _shape_of_int8(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    return _checked(".SCB", shapes[""], shapes[".SCB"], settings)


def _decode_int8(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """127 is the largest weight of a row, which `.SCB` has."""
    if bool(stored.get(".weight_format", torch.zeros(1)).any()):
        raise ValueError("weight_format is not row")
    return by_blocks(numbers(stored[""]), stored[".SCB"].float() / 127, settings.blocks, Tensor.mul_)


def _shape_of_nvfp4(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    codes = shapes["" if "" in shapes else "_packed"]
    return _checked("_scale", (*codes[:-1], 2 * codes[-1]), shapes["_scale"], settings)


def _decode_nvfp4(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """A scale of 8 bits for each 16 columns, and one for all, by which ModelOpt multiplies and compressed-tensors
    divides."""
    scale = stored["_scale"].float()
    if "_scale_2" in stored:
        by_blocks(scale, stored["_scale_2"].float(), settings.blocks, Tensor.mul_)
    else:
        by_blocks(scale, stored["_global_scale"].float(), settings.blocks, Tensor.div_)
    return by_blocks(floats(stored["" if "" in stored else "_packed"]), scale, settings.blocks, Tensor.mul_)


def _shape_of_mx(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    packed, scale = shapes["_packed"], shapes["_scale"]
    columns = scale[-1] * _MX if scale else 0
    if packed[:-1] != scale[:-1] or packed[-1] * 8 not in (4 * columns, 6 * columns):
        raise Misfit("_scale", f"is {list(scale)} for codes {list(packed)}; expected one for {_MX} columns each")
    return (*packed[:-1], columns)


def _decode_mx(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    values = floats(stored["_packed"], stored["_packed"].shape[-1] * 8 // shape[-1])
    return by_blocks(values, scales(stored["_scale"]), settings.blocks, Tensor.mul_).bfloat16()


def _shape_of_experts(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    blocks, scales = shapes["_blocks"], shapes["_scales"]
    if len(blocks) != 4 or blocks[:-1] != scales or 2 * blocks[-1] != _MX:
        raise Misfit("_scales", f"is {list(scales)} for blocks {list(blocks)}; expected one for {_MX} weights each")
    return blocks[0], blocks[2] * _MX, blocks[1]


def _decode_experts(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """gpt-oss: blocks [experts, rows, columns / 32, 16] of a matrix that transformers has transposed."""
    values = floats(stored["_blocks"]).mul_(scales(stored["_scales"]).unsqueeze(-1))
    return values.bfloat16().flatten(-2).transpose(1, 2).contiguous()


def _shape_of_integers(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    shape = tuple(int(length) for length in read["_shape"].flatten())
    packed = shapes["_packed"]
    if len(shape) != len(packed) or shape[:-1] != packed[:-1] or not 0 < packed[-1] * 4 <= shape[-1]:
        raise Misfit("_shape", f"says {list(shape)} for codes {list(packed)}")
    if "_g_idx" in shapes:
        if shapes["_g_idx"] != shape[-1:]:
            raise Misfit("_g_idx", f"is {list(shapes['_g_idx'])} for weights {list(shape)}")
        return shape
    return _checked("_scale", shape, shapes["_scale"], settings)


def _decode_integers(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """Integers of 1 to 8 bits, of which the lowest is stored as 0; zero points are packed along the rows."""
    bits = stored["_packed"].shape[-1] * 32 // shape[-1]
    middle, scale = 1 << (bits - 1), stored["_scale"].float()
    values = decoded(stored["_packed"], bits, torch.arange(-middle, middle).float())[..., : shape[-1]].contiguous()
    zero = None
    if "_zero_point" in stored:
        codes = unpacked(stored["_zero_point"].transpose(-1, -2), bits)[..., : shape[-2]]
        zero = codes.transpose(-1, -2).float() - middle
    if "_g_idx" in stored and bool((stored["_g_idx"] != -1).any()):  # -1: in their order
        group = _groups(stored["_g_idx"], scale.shape[-1])
        return (values if zero is None else values.sub_(zero[..., group])).mul_(scale[..., group])
    if zero is not None:
        by_blocks(values, zero, settings.blocks, Tensor.sub_)
    return by_blocks(values, scale, settings.blocks, Tensor.mul_)


def _groups(found: Tensor, count: int) -> Tensor:
    """The group of each column. Raises ValueError for one that is none of `count`."""
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise ValueError(f"g_idx has groups from {int(found.min())} to {int(found.max())}, there are {count}")
    return found.long()


def _shape_of_awq(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    if (settings.bits or settings.w_bit or 4) != 4 or (settings.version or "gemm").lower() != "gemm":
        found = f"{settings.bits or settings.w_bit or 4} bits, version {settings.version or 'gemm'}"
        raise Misfit(".qweight", f"is of {found}; expected 4 bits, version gemm")
    (inputs, words), groups, scales = shapes[".qweight"], shapes[".qzeros"], shapes[".scales"]
    if scales != (groups[0], 8 * words) or groups[1:] != (words,) or inputs % groups[0]:
        raise Misfit(".scales", f"is {list(scales)} for codes {[inputs, words]} and zeros {list(groups)}")
    return 8 * words, inputs


def _decode_awq(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """Words of 8 outputs, [inputs, outputs / 8]."""
    order, every = torch.tensor(_AWQ_ORDER).argsort(), torch.arange(16).float()
    codes, zeros = (
        torch.unflatten(decoded(stored[end], 4, every), -1, (-1, 8))[..., order].flatten(-2)
        for end in (".qweight", ".qzeros")
    )
    by_blocks(codes, zeros, settings.blocks, Tensor.sub_)
    return by_blocks(codes, stored[".scales"].float(), settings.blocks, Tensor.mul_).t().contiguous()


def _gptq_bits(shapes: Mapping[str, Shape], settings: Settings) -> int:
    """How many bits a weight has: where the order of inputs is stored, or matrices differ, by the tensors."""
    words, outputs = shapes[".qweight"]
    if settings.dynamic and ".g_idx" in shapes:
        return words * 32 // shapes[".g_idx"][0]
    if settings.dynamic and shapes[".qzeros"][1] * 32 % outputs == 0:
        return shapes[".qzeros"][1] * 32 // outputs
    return settings.bits or 4


def _shape_of_gptq(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    bits, (words, outputs) = _gptq_bits(shapes, settings), shapes[".qweight"]
    layout = settings.checkpoint_format or settings.format or "gptq"
    if bits not in (2, 3, 4, 8) or layout not in ("gptq", "gptq_v2"):
        raise Misfit(".qweight", f"is of {bits} bits, format {layout}; expected 2, 3, 4 or 8, gptq or gptq_v2")
    inputs, groups = words * 32 // bits, shapes[".scales"][0]
    if ".g_idx" in shapes and shapes[".g_idx"] != (inputs,):
        raise Misfit(".g_idx", f"is {list(shapes['.g_idx'])} for {inputs} inputs of {bits} bits")
    if shapes[".scales"] != (groups, outputs) or shapes[".qzeros"] != (groups, -(-outputs * bits // 32)):
        raise Misfit(".qzeros", f"is {list(shapes['.qzeros'])} for scales {list(shapes['.scales'])} of {bits} bits")
    if ".g_idx" not in shapes and inputs % groups:
        raise Misfit(".scales", f"is {list(shapes['.scales'])} for {inputs} inputs")
    return outputs, inputs


def _decode_gptq(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """Codes of an output packed along its inputs, [inputs * bits / 32, outputs], zeros along the outputs; the first
    version of the format stores zeros less one."""
    bits = stored[".qweight"].shape[0] * 32 // shape[1]
    first = (settings.checkpoint_format or settings.format or "gptq") == "gptq"
    zeros = (unpacked(stored[".qzeros"], bits)[:, : shape[0]] + first) & ((1 << bits) - 1)
    values = decoded(stored[".qweight"].t(), bits, torch.arange(1 << bits).float())
    scale, zero = stored[".scales"].float().t(), zeros.float().t()  # [outputs, groups]
    group = _groups(stored[".g_idx"], scale.shape[1]) if ".g_idx" in stored else None
    if group is not None and not torch.equal(group, torch.arange(shape[1]) * scale.shape[1] // shape[1]):
        return values.sub_(zero[:, group]).mul_(scale[:, group])
    return by_blocks(by_blocks(values, zero, settings.blocks, Tensor.sub_), scale, settings.blocks, Tensor.mul_)


_STATE = ".weight.quant_state.bitsandbytes__"


class _State(Stored):
    """What bitsandbytes says of a matrix of 4 bits."""

    shape: list[Size]
    blocksize: Size
    nested_blocksize: Size | None = None
    nested_offset: float | None = None


def _state(stored: Tensors) -> _State:
    blob = next(value for end, value in stored.items() if end.startswith(_STATE))
    return validate(_State, json.loads(bytes(blob.flatten().to(torch.uint8).tolist())))


def _shape_of_nf4(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    state = _state(read)
    weights = math.prod(state.shape)
    if math.prod(shapes[""]) != -(-weights // 2) or math.prod(shapes[".weight.absmax"]) != -(
        -weights // state.blocksize
    ):
        raise Misfit(".weight.absmax", f"is {list(shapes['.weight.absmax'])} for weights {state.shape}")
    return tuple(state.shape)


def _decode_nf4(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """Codes in the order of the weights, the first of two in the higher bits; a largest value for each block, itself
    in 8 bits with a scale for each block of these and an offset for all, or not."""
    state, largest = _state(stored), stored[".weight.absmax"]
    if ".weight.nested_absmax" in stored:
        scale = (
            stored[".weight.nested_absmax"]
            .float()
            .repeat_interleave(min(state.nested_blocksize or 256, largest.numel()))
        )
        largest = stored[".weight.nested_quant_map"].float()[largest.int()] * scale[: largest.numel()]
        largest = largest + (state.nested_offset or 0.0)
    every = stored[".weight.quant_map"].float()
    values = decoded(stored[""].flatten(), 4, every, high_first=True)[: math.prod(shape)]
    return values.mul_(largest.float().repeat_interleave(min(state.blocksize, values.numel()))[: values.numel()]).view(
        shape
    )


def _check_inputs(settings: Settings) -> None:
    if settings.use_rms_norm:
        raise Misfit("", "is of a model that norms the inputs of its matrices once more, which is not computed")


def _shape_of_rounded(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    _check_inputs(settings)
    return shapes[""]


def _decode_rounded(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """transformers rounds so in each pass (`quantization_mode` "online"): to -s, 0 or s, with the mean size s."""
    weight = stored[""]
    scale = 1 / weight.float().abs().mean().clamp(min=1e-5)
    return (weight.float() * scale).round_().clamp_(-1, 1).div_(scale).to(weight.dtype).float()


def _shape_of_ternary(shapes: Mapping[str, Shape], read: Tensors, settings: Settings) -> Shape:
    _check_inputs(settings)
    return (4 * shapes[""][0], *shapes[""][1:])


def _decode_ternary(stored: Tensors, shape: Shape, settings: Settings) -> Tensor:
    """Two bits a weight, those of four quarters of the rows in a byte; transformers divides what a `BitLinear` gives by
    the scale, and multiplies what an `AutoBitLinear` gives."""
    quarters = decoded(stored[""].unsqueeze(-1), 2, torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    values = quarters.movedim(-1, 0).reshape(shape)
    scale = stored["_scale"].float()
    return values.mul_(scale) if settings.linear_class == "autobitlinear" else values.div_(scale)


_FP8 = ("F8_E4M3", "F8_E5M2")
_COMPRESSED = "compressed-tensors"
_QUANT_MAPS = (".weight.nested_absmax", ".weight.nested_quant_map")

SCHEMES: tuple[Scheme, ...] = (
    Scheme("FP8", ("fp8", "mxfp8"), "", _FP8, ("_scale_inv",), _shape_of_numbers, _decode_numbers),
    Scheme("FP8", ("fbgemm_fp8", "modelopt", _COMPRESSED), "", _FP8, ("_scale",), _shape_of_numbers, _decode_numbers),
    Scheme("INT8", (_COMPRESSED,), "", ("I8",), ("_scale",), _shape_of_numbers, _decode_numbers, ("_zero_point",)),
    Scheme("NVFP4", ("modelopt",), "", ("U8",), ("_scale", "_scale_2"), _shape_of_nvfp4, _decode_nvfp4),
    Scheme("NVFP4", (_COMPRESSED,), "_packed", ("U8",), ("_scale", "_global_scale"), _shape_of_nvfp4, _decode_nvfp4),
    Scheme("MX", (_COMPRESSED,), "_packed", ("U8",), ("_scale",), _shape_of_mx, _decode_mx, dtype=torch.bfloat16),
    Scheme(
        "MXFP4", ("mxfp4",), "_blocks", ("U8",), ("_scales",), _shape_of_experts, _decode_experts, dtype=torch.bfloat16
    ),
    Scheme(
        "packed integers",
        (_COMPRESSED,),
        "_packed",
        ("I32",),
        ("_scale", "_shape"),
        _shape_of_integers,
        _decode_integers,
        ("_zero_point", "_g_idx"),
        read=("_shape",),
    ),
    Scheme("AWQ", ("awq",), ".qweight", ("I32",), (".qzeros", ".scales"), _shape_of_awq, _decode_awq),
    Scheme("GPTQ", ("gptq",), ".qweight", ("I32",), (".qzeros", ".scales"), _shape_of_gptq, _decode_gptq, (".g_idx",)),
    *(
        Scheme(
            kind.upper(),
            ("bitsandbytes",),
            "",
            ("U8",),
            (".weight.absmax", ".weight.quant_map", _STATE + kind),
            _shape_of_nf4,
            _decode_nf4,
            _QUANT_MAPS,
            read=(_STATE + kind,),
        )
        for kind in ("nf4", "fp4")
    ),
    Scheme("LLM.int8", ("bitsandbytes",), "", ("I8",), (".SCB",), _shape_of_int8, _decode_int8, (".weight_format",)),
    Scheme("ternary", ("bitnet",), "", ("U8",), ("_scale",), _shape_of_ternary, _decode_ternary),
    Scheme("ternary", ("bitnet",), "", ("BF16", "F16", "F32"), (), _shape_of_rounded, _decode_rounded),
)
"""The rows, the first of which counts whose tensors are there."""
