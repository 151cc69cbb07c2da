"""The tables that say what can be done with which models, out of the rows that refuse the others.

    python tools/families_table.py           prints them
    python tools/families_table.py --write   puts them into docs/formats.md

The first has commands and engines, the second what `pack` makes. They have from
`models/families.py` what commands take, from `formats/table.py` what formats hold, and from `runtime/backends.py` and
`runtime/backends.py` what engines compute, of a model as the family's usual ones are.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import UserError
from sparsepack.formats.kinds import DENSE, EXPERTS
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.families import FAMILIES, check_taken
from sparsepack.models.family import Family
from sparsepack.models.hf_config import architecture_of
from sparsepack.runtime.backends import BACKENDS, Backend, traits_of
from sparsepack.tables import Table, markdown

PAGE = Path("docs/formats.md")

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {}),
    "Ministral": ("ministral", {"head_dim": 128}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Phi-3, Phi-4": ("phi3", {}),
    "Phi-4-mini": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3 (text)": ("gemma3_text", {}),
    "Gemma 4 (text, dense)": ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    "Gemma 4 E2B, E4B (text)": ("gemma4_text", {"num_kv_shared_layers": 18, "use_double_wide_mlp": True}),
    "Gemma 4 26B-A4B (text)": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
        },
    ),
    "Gemma 4 unified (text, dense)": ("gemma4_unified_text", {}),
    "VaultGemma": ("vaultgemma", {}),
    "Granite 3": ("granite", {}),
    "Granite 4 (dense)": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ),
    "Granite 4 H (dense)": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "SmolLM3": ("smollm3", {}),
    "Olmo": ("olmo", {}),
    "Olmo 2": ("olmo2", {}),
    "Olmo 3": ("olmo3", {}),
    "EXAONE 4": ("exaone4", {}),
    "HyperCLOVA X": ("hyperclovax", {}),
    "CWM": ("cwm", {}),
    "GLM-4": ("glm", {}),
    "GLM-Z1": ("glm4", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Helium": ("helium", {}),
    "Seed-OSS": ("seed_oss", {}),
    "BitNet b1.58": ("bitnet", {}),
    "Command R7B, Command A (Cohere 2)": ("cohere2", {}),
    "Apertus": ("apertus", {}),
    "Ministral 3": ("ministral3", {}),
    "Arcee (AFM-4.5B)": ("arcee", {}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "Nemotron-4, Minitron": ("nemotron", {"num_key_value_heads": 8}),
    "Nemotron-H, Nemotron 3 Nano": ("nemotron_h", {}),
    "Mixtral": ("mixtral", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Qwen2-MoE": ("qwen2_moe", {}),
    "OLMoE": ("olmoe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "Qwen3.5, Qwen3.6 (text)": ("qwen3_5_text", {}),
    "Qwen3.5-MoE, Qwen3.6-MoE (text)": ("qwen3_5_moe_text", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "DeepSeek V3, R1": ("deepseek_v3", {}),
    "DeepSeek V2": ("deepseek_v2", {"num_experts_per_tok": 6}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "LFM2-MoE": ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    "OPT": ("opt", {}),
}
"""For people -> the family, and what such a model's configuration has that is not its family's default."""
VERBS = ("rotate", "distil")
FORMAT_GROUPS = ("zigzag-q4_k", "neuron-q4_k", "slide-int8", "q4_k")
"""One format of each kind; llama.cpp loads the last."""
HEADS = {"neuron-q4_k": "neuron-q4_k (with ReLU)", "slide-int8": "slid", "q4_k": "for llama.cpp"}
EVERY = "calibrate, thresholds, prune, trace, eval"
YES, NO = "yes", "-"


def tables() -> str:
    """Both tables in Markdown."""
    return "\n\n".join(markdown(Table(heads, rows)) for heads, rows in (_of_verbs(), _of_formats()))


def _of_verbs() -> tuple[list[str], list[list[str]]]:
    rows = [
        [name, YES]
        + [_cell(takes(verb, family_of_model(kind, changes))) for verb in VERBS]
        + [_cell(runs(row, family_of_model(kind, changes), changes)) for row in BACKENDS.values()]
        for name, (kind, changes) in MODELS.items()
    ]
    return ["models", EVERY, *VERBS, *BACKENDS], rows


def _of_formats() -> tuple[list[str], list[list[str]]]:
    rows = [
        [name]
        + [_cell(holds(FORMATS[format], family_of_model(kind, changes))) for format in FORMAT_GROUPS]
        + [_cell(all(takes(verb, family_of_model(kind, changes)) for verb in ("pack", "refit")))]
        for name, (kind, changes) in MODELS.items()
    ]
    return ["models", *(HEADS.get(name, name) for name in FORMAT_GROUPS), "pack --refit"], rows


def _cell(able: bool) -> str:
    return YES if able else NO


def family_of_model(kind: str, changes: Mapping[str, Any]) -> Family:
    """The row of a model in `MODELS`, as far as it depends on the configuration."""
    from transformers import AutoConfig

    family = FAMILIES[kind]
    if family.shared_kv is None and family.mamba is None and family.mixture is None:
        return family
    return family.of(AutoConfig.for_model(kind, **changes))


def takes(verb: str, family: Family) -> bool:
    """Whether a verb takes a family."""
    try:
        check_taken(verb, family, "")
    except UserError:
        return False
    return True


def holds(format: Format, family: Family) -> bool:
    """Whether a format has a place for models of a family."""
    return takes("pack", family) and not format.lacks(family) and (format.runs or bool(family.gguf) or format.folder)


def runs(row: Backend, family: Family, changes: Mapping[str, Any]) -> bool:
    """Whether a backend computes a model of a family with such a configuration, up to the length it was trained for."""
    from transformers import AutoConfig

    kind = DENSE if family.experts is None else EXPERTS
    if not takes("pack", family) or kind not in row.mlps:
        return False
    architecture = architecture_of(AutoConfig.for_model(family.model_type, **changes), None)
    return row.traits.issuperset(traits_of(architecture, 0))


def with_table(page: str, table: str) -> str:
    """A page in Markdown with a table in place of its own of the same first and last columns."""
    columns = [cell.strip() for cell in table.splitlines()[0].split("|")]
    lines = page.split("\n")
    for first, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and (cells[1], cells[-2]) == (columns[1], columns[-2]):
            last = first
            while lines[last].startswith("|"):
                last += 1
            return "\n".join([*lines[:first], *table.splitlines(), *lines[last:]])
    raise ValueError(f"no table from {columns[1]!r} to {columns[-2]!r}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        page = PAGE.read_text(encoding="utf-8")
        for table in tables().split("\n\n"):
            page = with_table(page, table)
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(tables())
