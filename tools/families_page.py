"""docs/families.md: which causal language models of transformers can be measured, whether or not a family has a row.

    python tools/families_page.py                 tries all model types, and writes the page
    python tools/families_page.py falcon jamba    tries these alone, and changes their lines of the page

Of each type's configuration a tiny one is made by rules (`tiny_config`), a random model of it is saved, and calibrate,
thresholds, eval, prune and trace run on it. What a block by block run gives is compared with the whole stock model, and
the pruned folder is loaded by transformers.
"""

import os
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYERS, VOCABULARY, MOST_WEIGHTS = 4, 512, 20_000_000
_WIDE, _MIDDLE, _NARROW, _HEADS, _HEAD = 64, 96, 32, 4, 16
_NAMES: Mapping[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    _WIDE: "hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim lru_width attention_hidden_size",
    _MIDDLE: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim intermediate_size_mlp "
    "dense_intermediate_size block_ff_dim",
    _NARROW: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size attention_head_dim",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads swa_num_attention_heads linear_num_value_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts expert_num mamba_d_conv conv_kernel linear_conv_kernel_dim mamba_dt_rank "
    "time_step_rank full_attention_interval",
    2: "num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k top_k top_k_experts moe_top_k mamba_expand index_n_heads zero_expert_num attn_layer_period "
    "expert_layer_period eos_token_id",
    _HEAD: "head_dim global_head_dim swa_head_dim v_head_dim kv_lora_rank qk_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim linear_key_head_dim linear_value_head_dim index_head_dim sliding_window attention_window_size "
    "mamba_chunk_size chunk_size",
    24: "q_lora_rank",
    8: "qk_rope_head_dim qk_nope_head_dim mamba_d_state ssm_state_size state_size mamba_n_heads mamba_num_heads "
    "n_mamba_heads num_mamba_heads index_topk hidden_size_per_layer_input rotary_dim",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups n_shared_experts num_shared_experts "
    "first_k_dense_replace num_dense_layers moe_layer_start_index moe_num_shared_experts attn_layer_offset "
    "expert_layer_offset bos_token_id num_mem_blocks",
    0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers",
    128: "mamba_d_ssm",
    256: "max_position_embeddings n_positions max_seq_len n_ctx",
    3: "conv_L_cache",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_MORE: Mapping[str, Mapping[str, Any]] = {
    "dots1": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "nemotron": {"num_key_value_heads": 2},
    "ministral": {"head_dim": _HEAD},
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": _HEAD},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""What the rules do not say of some types: fields that are None by themselves."""


def tiny_config(model_type: str) -> Any:
    """A small configuration of a type: each size by its name, of lists of layers one layer of each kind at least."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    usual = kind().to_dict()
    layers = next((usual[name] for name in _DEPTH if type(usual.get(name)) is int), 0)
    latent = "qk_rope_head_dim" in usual  # of these head sizes follow
    values: dict[str, Any] = {}
    for name, value in usual.items():
        if name in _SIZES and type(value) is int and not (latent and name in ("head_dim", "qk_head_dim")):
            values[name] = _HEADS if latent and name == "num_key_value_heads" else _SIZES[name]
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            first = sorted(value.index(each) for number, each in enumerate(value) if value.index(each) == number)
            values[name] = [value[(first * LAYERS)[number]] for number in range(LAYERS)]
    return kind(**{**values, **_MORE.get(model_type, {})})


def tokenizer() -> Any:
    """A tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def make_tiny(model_type: str, folder: Path) -> Any:
    """Save a random model of a type, with norms and biases that are random, too; returns it."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    if config.get_text_config() is not config:
        raise NoModel("takes more than text; its text part is a type of its own, or none")
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        weights = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise NoModel(f"no tiny model by our rules: {weights:,} weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name and not name.endswith("dt_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


class NoModel(Exception):
    """No tiny model could be made."""


@dataclass
class Row:
    """What came of a model type; `refusals` has what each command said that did not work, under its name."""

    model_type: str
    has_row: bool = False
    sites: str = ""
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether all commands work but perhaps trace, which is for blocks with equal MLPs."""
        return not self.refusals.keys() - {"trace"}


COMMANDS = ("calibrate", "thresholds", "eval", "prune", "trace")


def try_type(model_type: str, folder: Path) -> Row:
    """Run every command on a tiny model of a type."""
    from sparsepack.errors import UserError

    row = Row(model_type)
    try:
        model = make_tiny(model_type, folder / "model")
    except NoModel as error:
        row.refusals = {"made": str(error)}
        return row
    except Exception as error:  # transformers' own code, on numbers that are unusual
        row.refusals = {"made": f"no tiny model by our rules: {_line(error)}"}
        return row
    step = "calibrate"
    try:
        for step in _steps(model, folder, row):  # noqa: B007, it is told where one fails
            pass
    except UserError as error:
        row.refusals[step] = _line(error).removeprefix(f"{folder / 'model'}: ")
    except Exception as error:  # a fault of ours, which the page shows
        row.refusals[step] = f"{type(error).__name__}: {_line(error)}"
    return row


def _steps(model: Any, folder: Path, row: Row) -> Iterator[str]:
    """Run the commands, one after the other; yields the name of the one that comes next."""
    from transformers import AutoModelForCausalLM

    from sparsepack.calibrate.collect import CalibrateOptions
    from sparsepack.calibrate.collection import calibrate
    from sparsepack.calibrate.find_thresholds import make_thresholds
    from sparsepack.calibrate.prune import PruneOptions
    from sparsepack.calibrate.pruning import prune
    from sparsepack.calibrate.thresholds import ThresholdsOptions
    from sparsepack.calibrate.trace import TraceOptions
    from sparsepack.calibrate.tracing import trace
    from sparsepack.errors import PlacementError
    from sparsepack.eval.options import EvalRequest
    from sparsepack.eval.run import evaluate
    from sparsepack.models.checkpoint.checkpoint import open_checkpoint

    yield "calibrate"
    text = folder / "text.txt"
    text.write_text(next(iter(pydoc_data.topics.topics.values()))[:3000])
    checkpoint = open_checkpoint(folder / "model")
    row.has_row = checkpoint.family.has_row
    kinds = dict.fromkeys(
        tuple(checkpoint.family_at(layer).projections_of(layer)) for layer in range(checkpoint.layers)
    )
    row.sites = "; ".join(", ".join(kind) for kind in kinds)
    check_logits(checkpoint, model)
    options = CalibrateOptions(context=48, samples=4, held_out=0)
    calibrate(folder / "model", str(text), folder / "cal", options)
    yield "thresholds"
    for allocation in ("fisher", "teal"):
        table = folder / f"{allocation}.json"
        made = ThresholdsOptions(sparsity=0.5, allocation=allocation, windows=2)
        make_thresholds(folder / "model", folder / "cal", made, table)
    yield "eval"
    name = str(folder / "model")
    request = EvalRequest(name, folder / "fisher.json", (str(text),), context=48, windows=2, against=name)
    result = evaluate(request)
    realised = result["perplexity"][0]["realised_sparsity"]["of_sparse_sites"]
    if not 0.3 < realised < 0.7:
        raise ValueError(f"thresholds of 50 % skip {realised:.1%}")
    yield "prune"
    prune(folder / "model", folder / "pruned", PruneOptions(2, 4, windows=2), folder / "cal")
    pruned, info = AutoModelForCausalLM.from_pretrained(folder / "pruned", output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ValueError(f"transformers misses {min({*info['missing_keys'], *info['unexpected_keys']})}")
    written = open_checkpoint(folder / "pruned")
    for name in (f"{checkpoint.family.block(layer)}.{name}" for layer, name in _matrices(checkpoint)):
        weight = written.tensor(name)
        share = float((weight == 0).float().mean())
        if share < 0.35 or tuple(weight.shape) != checkpoint.source.shapes[name]:
            raise ValueError(f"{name} has {share:.0%} zeros once half is pruned")
    check_logits(written, pruned)
    yield "trace"
    try:
        try:
            trace(folder / "model", str(text), folder / "trace", TraceOptions(sessions=2, tokens=32, prompt=4))
        except PlacementError as error:
            if "give --share" not in str(error):
                raise
            few = TraceOptions(sessions=2, tokens=32, prompt=4, share=0.5)
            trace(folder / "model", str(text), folder / "trace", few, folder / "cal")
    except PlacementError as error:
        row.refusals["trace"] = _line(error).removeprefix(f"{folder / 'model'}: ")


def _matrices(checkpoint: Any) -> Iterator[tuple[int, str]]:
    for layer, site in checkpoint.sites:
        for projection in checkpoint.family_at(layer).projections_of(layer)[site]:
            yield layer, checkpoint.family.weight(projection)


def check_logits(checkpoint: Any, model: Any) -> None:
    """Raise ValueError unless a run block by block gives the whole stock model's logits."""
    import torch

    from sparsepack.eval.scorer import StreamedScorer

    scorer = StreamedScorer(checkpoint, {}, 48)
    ids = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(1))
    nowhere = torch.full((3,), 40)
    found = scorer.head(slice(None))(scorer.hidden(ids, None, nowhere, 2))
    with torch.no_grad():
        expected = model.float()(input_ids=ids, use_cache=False).logits
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off < 1e-4:
        raise ValueError(f"logits block by block are off by {off:.1e} of the largest")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what commands say on stderr."""
    with open(os.devnull, "w") as nowhere:
        before, sys.stderr = sys.stderr, nowhere
        try:
            yield
        finally:
            sys.stderr = before


def tried(model_type: str) -> Row:
    """`try_type` in a folder that is thrown away."""
    import warnings

    import torch
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        return try_type(model_type, Path(folder))


def all_types() -> list[str]:
    """Every model type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


SECONDS = 90
"""A type that takes longer is given up."""


def rows_of(model_types: list[str], workers: int = 2) -> Iterator[Row]:
    """The rows of model types, each tried in a process of its own, in their order."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    for first in range(0, len(model_types), workers):
        here = model_types[first : first + workers]
        futures = [pool.submit(tried, model_type) for model_type in here]
        for model_type, future in zip(here, futures, strict=True):
            try:
                yield future.result(SECONDS)
            except (TimeoutError, BrokenProcessPool) as error:
                yield Row(model_type, refusals={"made": f"given up ({type(error).__name__})"})
                for process in list(pool._processes.values()):
                    process.kill()
                pool = ProcessPoolExecutor(workers, get_context("spawn"))
    pool.shutdown()


def page(rows: list[Row], version: str) -> str:
    """docs/families.md."""
    measured, others = [row for row in rows if row.measured], [row for row in rows if not row.measured]
    lines = [
        "# Families that are measured",
        "",
        "`calibrate`, `thresholds`, `prune`, `trace` and `eval` take models that no engine of ours runs: which",
        "matrices read the same vector is found in the model of transformers. A row (`models/families.py`) is what",
        "`pack`, `rotate`, `distil` and engines need beyond that. `prune` writes a folder that transformers loads.",
        "",
        f"Tried on tiny random models of all {len(rows)} causal model types of transformers {version} by",
        "`python tools/families_page.py`, which wrote this page: logits block by block equal the whole model's, tables",
        "of 50 % skip 30 to 70 %, transformers loads the pruned folder, and half of each matrix is zero there. `trace`",
        "is for models whose blocks have as many neurons, or experts, each.",
        "",
        f"**{len(measured)} of {len(rows)} types are measured**, {sum(row.has_row for row in measured)} of them by a",
        "row of their own.",
        "",
        "| model type | row | sites of its kinds of blocks | trace |",
        "|---|---|---|---|",
    ]
    for row in measured:
        traced = row.refusals.get("trace", "yes").replace("a trace is of blocks with equal MLPs; here they have", "no:")
        lines.append(f"| {row.model_type} | {'yes' if row.has_row else 'no'} | {row.sites} | {traced} |")
    lines += ["", "## Not measured", "", "| model type | why |", "|---|---|"]
    for row in others:
        ((step, reason), *_) = row.refusals.items()
        lines.append(f"| {row.model_type} | {'' if step == 'made' else f'{step}: '}{_escaped(reason)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")
    _, cut, why = text.partition("nor can they be measured: ")
    return (why if cut else text).partition("; expected one of llama")[0].strip()


PAGE = Path(__file__).parents[1] / "docs" / "families.md"


def rows_of_page(text: str) -> dict[str, Row]:
    """What `page` was written of, in order."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "model type":
            continue
        name, *rest = (cell.replace("\0", "|").replace("&lt;", "<") for cell in cells)
        if len(rest) == 1:
            rows[name] = Row(name, refusals={"made": rest[0]})
        else:
            has_row, sites, traced = rest
            rows[name] = Row(name, has_row == "yes", sites, {} if traced == "yes" else {"trace": traced})
    return rows


def main(model_types: list[str]) -> None:
    """Write the page, or what some types have of it."""
    import transformers

    rows = rows_of_page(PAGE.read_text()) if model_types else {}
    for row in rows_of(model_types or all_types()):
        rows[row.model_type] = row
        print(row.model_type, "yes" if row.measured else "no", row.refusals or "", flush=True)
    PAGE.write_text(page([rows[name] for name in sorted(rows)], transformers.__version__))


if __name__ == "__main__":
    main(sys.argv[1:])
