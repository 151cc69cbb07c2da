"""Encoders of quantised releases, written without a look at the decoders: each gives the tensors that stand in place of
a matrix, by the ends of their names (`models.checkpoint.schemes`), and the values that they mean."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models_for_tests import edit_config
from safetensors.torch import load_file, save_file
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NF4 = [
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
]


@dataclass(frozen=True)
class Release:
    """How a release stores its matrices: what config.json says, and what makes its tensors of a float32 matrix."""

    settings: Mapping[str, Any]
    encode: Callable[[Tensor], Encoded]
    name: str
    exact: bool = True
    more: Mapping[str, Tensor] = field(default_factory=dict)


def packed_bits(codes: np.ndarray, bits: int) -> Tensor:
    """Codes along the last dimension as a string of bits, the lowest first, in words of 32."""
    each = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    string = each.reshape(*codes.shape[:-1], -1)
    string = np.pad(string, [(0, 0)] * (codes.ndim - 1) + [(0, -string.shape[-1] % 32)])
    return torch.from_numpy(np.packbits(string, axis=-1, bitorder="little").view(np.int32).copy())


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


def fp8(scale_shape: Callable[[Tensor], Tensor], end: str = "_scale_inv", dtype=torch.float32):
    """FP8 with the scales that `scale_shape` makes of the largest values of blocks."""

    def encode(weight: Tensor) -> Encoded:
        scale = (scale_shape(weight.abs()) / 448).to(dtype)
        wide = spread(scale, weight.shape)
        codes = (weight / wide).to(torch.float8_e4m3fn)
        return {"": codes, end: scale}, codes.float() * wide

    return encode


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each weight, where blocks are of 128 rows, 128 columns, or all of them."""
    whole = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    rows = [
        whole[row // 128 if whole.shape[0] == -(-shape[0] // 128) else row % whole.shape[0]] for row in range(shape[0])
    ]
    wide = torch.stack(rows)
    size = shape[1] if wide.shape[1] == 1 else 128
    return torch.stack([wide[:, column // size] for column in range(shape[1])], 1)


def by_blocks(size: Tensor) -> Tensor:
    return torch.stack([torch.stack([part.amax() for part in rows.split(128, 1)]) for rows in size.split(128, 0)])


def packed_integers(bits: int, group: int, symmetric: bool, order: bool = False):
    """compressed-tensors' pack-quantized; `order`: groups of columns in an order of their own, weight_g_idx."""

    def encode(weight: Tensor) -> Encoded:
        rows, columns = weight.shape
        which = torch.arange(columns) // group
        if order:
            which = which[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        middle, groups = 2 ** (bits - 1), columns // group
        scale, zero = torch.empty(rows, groups), torch.zeros(rows, groups)
        for one in range(groups):
            part = weight[:, which == one]
            if symmetric:
                scale[:, one] = part.abs().amax(1) / (middle - 0.5)
            else:
                scale[:, one] = (part.amax(1) - part.amin(1)) / (2 * middle - 1)
                zero[:, one] = (-part.amin(1) / scale[:, one]).round() - middle
        scale = scale.bfloat16().float()
        codes = (weight / scale[:, which] + zero[:, which]).round().clamp(-middle, middle - 1)
        tensors = {
            "_packed": packed_bits((codes + middle).numpy(), bits),
            "_scale": scale.bfloat16(),
            "_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["_zero_point"] = packed_bits((zero + middle).t().numpy(), bits).t().contiguous()
        if order:
            tensors["_g_idx"] = which.int()
        return tensors, (codes - zero[:, which]) * scale[:, which]

    return encode


def int8(symmetric: bool):
    def encode(weight: Tensor) -> Encoded:
        scale = weight.abs().amax(1, keepdim=True) / 100
        zero = torch.zeros_like(scale) if symmetric else torch.full_like(scale, 3)
        codes = (weight / scale + zero).round().clamp(-128, 127)
        tensors = {"": codes.to(torch.int8), "_scale": scale}
        return tensors | ({} if symmetric else {"_zero_point": zero.to(torch.int8)}), (codes - zero) * scale

    return encode


def fp4(weight: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Codes of FP4, the first of two in the lower half of a byte, and the numbers that they mean without the scale."""
    table = torch.tensor(FP4 + [-value for value in FP4])
    codes = nearest(weight / scale.repeat_interleave(size, 1), table)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), table[codes]


def nvfp4(names: tuple[str, str, str], inverse: bool):
    """NVFP4: `names` are the ends of the codes, the scales and the scale of all."""

    def encode(weight: Tensor) -> Encoded:
        most = weight.unflatten(1, (-1, 16)).abs().amax(2) / 6
        whole = most.amax() / 448
        whole = 1 / (1 / whole) if inverse else whole
        scale = (most / whole).to(torch.float8_e4m3fn)
        stored = (1 / whole if inverse else whole).reshape(1) if inverse else whole
        meant = scale.float() / stored if inverse else scale.float() * stored
        codes, values = fp4(weight, meant, 16)
        return dict(zip(names, (codes, scale, stored), strict=True)), values * meant.repeat_interleave(16, 1)

    return encode


def mx_scale(weight: Tensor, largest: float) -> Tensor:
    """Exponents of two, with an offset of 127, for each 32 columns."""
    most = weight.unflatten(1, (-1, 32)).abs().amax(2)
    return ((most / largest).log2().ceil() + 127).to(torch.uint8)


def mxfp4(weight: Tensor) -> Encoded:
    scale = mx_scale(weight, 6)
    meant = 2.0 ** (scale.float() - 127)
    codes, values = fp4(weight, meant, 32)
    return {"_packed": codes, "_scale": scale}, values * meant.repeat_interleave(32, 1)


def mxfp8(weight: Tensor) -> Encoded:
    scale = mx_scale(weight, 448)
    wide = (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scale}, codes.float() * wide


def grouped(weight: Tensor, bits: int, which: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [outputs, inputs], scales and zeros [groups, outputs] of columns' groups, and what they mean."""
    groups, most = int(which.max()) + 1, 2**bits - 1
    scale, zero = torch.empty(groups, len(weight)), torch.empty(groups, len(weight))
    for one in range(groups):
        part = weight[:, which == one]
        scale[one] = ((part.amax(1) - part.amin(1)) / most).half().float()
        zero[one] = (-part.amin(1) / scale[one]).round().clamp(1, most)
    wide_scale, wide_zero = scale.t()[:, which], zero.t()[:, which]
    codes = (weight / wide_scale + wide_zero).round().clamp(0, most)
    return codes, scale, zero, (codes - wide_zero) * wide_scale


def gptq(bits: int, group: int, shuffled: bool, version: int = 1, named: bool = True):
    def encode(weight: Tensor) -> Encoded:
        which = torch.arange(weight.shape[1]) // group
        if shuffled:
            which = which[torch.randperm(len(which), generator=torch.Generator().manual_seed(2))]
        codes, scale, zero, values = grouped(weight, bits, which)
        tensors = {
            ".qweight": packed_bits(codes.numpy(), bits).t().contiguous(),
            ".qzeros": packed_bits((zero - int(version == 1)).numpy(), bits),
            ".scales": scale.half(),
        }
        return tensors | ({".g_idx": which.int()} if named else {}), values

    return encode


def awq(weight: Tensor) -> Encoded:
    codes, scale, zero, values = grouped(weight, 4, torch.arange(weight.shape[1]) // 64)

    def words(numbers: Tensor) -> Tensor:
        eights = numbers.long().unflatten(-1, (-1, 8))
        found = torch.zeros(eights.shape[:-1], dtype=torch.long)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= eights[..., output] << (4 * place)
        return found.to(torch.int32)

    return {".qweight": words(codes.t()), ".qzeros": words(zero), ".scales": scale.half()}, values


def bitsandbytes(kind: str, nested: bool):
    def encode(weight: Tensor) -> Encoded:
        table = torch.tensor(NF4 if kind == "nf4" else FP4 + [-value for value in FP4])
        flat = weight.flatten()
        parts = flat.split(64)
        most = torch.stack([part.abs().amax() for part in parts]) / table.abs().amax()
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors = {".weight.absmax": most, ".weight.quant_map": table}
        if nested:
            offset = float(most.mean())
            second = torch.linspace(-1, 1, 256)
            largest = torch.stack([part.abs().amax() for part in (most - offset).split(256)])
            codes = nearest((most - offset) / largest.repeat_interleave(256)[: len(most)], second)
            most = second[codes] * largest.repeat_interleave(256)[: len(most)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {
                ".weight.absmax": codes.to(torch.uint8),
                ".weight.nested_absmax": largest,
                ".weight.nested_quant_map": second,
            }
        wide = most.repeat_interleave(64)[: len(flat)]
        codes = nearest(flat / wide, table)
        tensors[""] = (16 * codes[::2] + codes[1::2]).to(torch.uint8).unsqueeze(1)
        blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = blob
        return tensors, (table[codes] * wide).reshape(weight.shape)

    return encode


def llm_int8(weight: Tensor) -> Encoded:
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round()
    tensors = {"": codes.to(torch.int8), ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * (most[:, None] / 127)


def ternary(multiplies: bool):
    def encode(weight: Tensor) -> Encoded:
        from transformers.integrations.bitnet import pack_weights

        size = weight.abs().mean()
        codes = (weight / size).round().clamp(-1, 1)
        scale = (size if multiplies else 1 / size).reshape(1)
        values = codes * scale if multiplies else codes / scale
        return {"": pack_weights(codes.clone()), "_scale": scale}, values

    return encode


def rounded(weight: Tensor) -> Encoded:
    """BitNet's master weights, which its layers round in each pass."""
    from transformers.integrations.bitnet import WeightQuant

    stored = weight.bfloat16()
    return {"": stored}, WeightQuant.forward.__wrapped__(None, stored).float()


COMPRESSED = {"quant_method": "compressed-tensors"}
GROUP = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 64}}}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "group_size": 64, "desc_act": True}
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}

RELEASES: dict[str, Release] = {
    "fp8, blocks": Release(FP8, fp8(by_blocks), "FP8"),
    "fp8, blocks, bfloat16 scales": Release(FP8, fp8(by_blocks, dtype=torch.bfloat16), "FP8"),
    "fp8, one scale": Release(
        {**FP8, "weight_block_size": None}, fp8(lambda size: size.amax(), dtype=torch.bfloat16), "FP8"
    ),
    "mxfp8": Release({"quant_method": "mxfp8"}, mxfp8, "FP8"),
    "fbgemm fp8, rows": Release(
        {"quant_method": "fbgemm_fp8"}, fp8(lambda size: size.amax(1, keepdim=True), "_scale"), "FP8"
    ),
    "modelopt fp8": Release(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, fp8(lambda size: size.amax(), "_scale"), "FP8"
    ),
    "modelopt nvfp4": Release(MODELOPT, nvfp4(("", "_scale", "_scale_2"), False), "NVFP4", exact=False),
    "compressed fp8, rows": Release(
        {**COMPRESSED, "format": "float-quantized"}, fp8(lambda size: size.amax(1, keepdim=True), "_scale"), "FP8"
    ),
    "compressed int8": Release({**COMPRESSED, "format": "int-quantized"}, int8(True), "INT8"),
    "compressed int8, zero points": Release({**COMPRESSED, "format": "naive-quantized"}, int8(False), "INT8"),
    "compressed nvfp4": Release(
        {**COMPRESSED, "format": "nvfp4-pack-quantized"},
        nvfp4(("_packed", "_scale", "_global_scale"), True),
        "NVFP4",
        exact=False,
    ),
    "compressed mxfp4": Release({**COMPRESSED, "format": "mxfp4-pack-quantized"}, mxfp4, "MX"),
    **{
        f"compressed int{bits}, {'symmetric' if symmetric else 'zero points'}{', ordered' * order}": Release(
            {**COMPRESSED, **GROUP, "format": "pack-quantized"},
            packed_integers(bits, 32, symmetric, order),
            "packed integers",
        )
        for bits, symmetric, order in ((4, True, False), (4, False, True), (8, True, True), (3, False, False))
    },
    **{
        f"gptq, {bits} bits, version {version}{', shuffled' * shuffled}{', unnamed' * (not named)}": Release(
            {**GPTQ, "bits": bits, **({"checkpoint_format": "gptq_v2"} if version == 2 else {})},
            gptq(bits, 32, shuffled, version, named),
            "GPTQ",
        )
        for bits, shuffled, version, named in (
            (4, False, 1, True),
            (4, True, 1, True),
            (2, True, 2, True),
            (3, True, 1, True),
            (8, False, 2, False),
        )
    },
    "auto-round": Release(
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
        gptq(4, 32, False, 1, False),
        "GPTQ",
    ),
    "awq": Release({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq, "AWQ"),
    "nf4": Release(BITS, bitsandbytes("nf4", False), "NF4"),
    "nf4, nested": Release(BITS, bitsandbytes("nf4", True), "NF4", exact=False),
    "fp4": Release(BITS, bitsandbytes("fp4", False), "FP4"),
    "llm.int8": Release({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "LLM.int8"),
    "bitnet": Release({"quant_method": "bitnet"}, ternary(False), "ternary"),
    "bitnet, multiplied": Release(
        {"quant_method": "bitnet", "linear_class": "autobitlinear"}, ternary(True), "ternary"
    ),
    "bitnet, rounded as it is read": Release(
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}, rounded, "ternary"
    ),
}


def stored_as(name: str, end: str) -> str:
    return name.removesuffix(".weight") + end if end.startswith(".") else name + end


def release(folder: Path, kind: Release, only: str = "_proj.weight") -> dict[str, Tensor]:
    """Store the matrices of a folder's model whose names end so in place of what they are; returns what all mean."""
    tensors, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        meant[name] = weight
        if name.endswith(only) and weight.dim() == 2:
            encoded, meant[name] = kind.encode(weight.float())
            tensors |= {stored_as(name, end): each.contiguous() for end, each in encoded.items()}
            tensors[stored_as(name, ".input_scale")] = torch.tensor(0.5)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=dict(kind.settings))
    return meant
