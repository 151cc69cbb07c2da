"""Decoding with long texts, every token of the cache read or the best 1/16: a Llama-2-7B with random weights.

Two decoders, each beside itself. "BF16" has its linears in torch, as stock code has them, and a step is a CUDA graph;
its dense attention is torch's best (cuDNN) or ours, whichever is faster. "Q4_K" is the engine of this package, dense
and sparse by `dense`; no column of a matrix is skipped, so that attention is the only difference. All ways take turns.

Before anything is timed, logits of the BF16 decoder with two layers are compared with the stock model's, and sparse
attention that reads every token with dense attention. Layers of the BF16 decoder share the memory of their caches in
turns (more than 2 GB of it), so that long texts fit; no cache of the GPU holds that. The bound is what weights, labels,
keys and values take that a step has to read, at the measured bandwidth.
"""

import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shared.random_models import random_model
from benchmarks.shared.shapes import LLAMA_7B, llama_config, random_ids
from benchmarks.shared.timing import (
    announced_bandwidth,
    check_close,
    device_line,
    interleaved,
    json_option,
    relative_error,
    write_figures,
)
from sparsepack.bench.linears import graph_seconds
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.cuda.attention import attention as dense_attention
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.cuda.attention.attention import AttentionParameters
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.tables import Table, markdown

POLICY = TokenPolicy(Fraction(1, 16), sinks=4, recent=64, min_context=0)
CHANNELS = 32
HEAD_DIM = LLAMA_7B.hidden // LLAMA_7B.heads
CASES = (
    (4, 2048),
    (4, 8192),
    (4, 16384),
    (8, 4096),
    (8, 16384),
    (16, 2048),
    (16, 8192),
    (32, 2048),
    (32, 8192),
    (32, 16384),
)
"""Texts and tokens of the BF16 decoder."""
ENGINE_CASES = ((1, 7000), (4, 4096), (8, 4096))
"""Texts and tokens of the engine, which takes up to 8 texts."""
CACHE_BYTES = 2 << 30
LIMIT = 2e-2
"""The largest relative error of logits in BF16."""


class Decoder:
    """A Llama's decoding step in BF16, its linears torch's.

    model  -- the stock model, on the GPU
    texts  -- side by side, each of `tokens` tokens with its new one
    """

    def __init__(self, model: Any, texts: int, tokens: int, policy: TokenPolicy = POLICY) -> None:
        self.texts, self.tokens, self.policy = texts, tokens, policy
        self._model, config = model, model.config
        self._eps, heads, kv_heads = config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads
        self._shape = (heads, kv_heads)
        room = (texts, kv_heads, tokens, HEAD_DIM)
        each = 2 * 2 * texts * kv_heads * tokens * HEAD_DIM
        self.cache_bytes = each * config.num_hidden_layers
        copies = min(config.num_hidden_layers, max(2, -(-CACHE_BYTES // each)))
        heavy = torch.arange(CHANNELS, device="cuda").expand(kv_heads, -1)
        cos, sin = (x[0, :, : HEAD_DIM // 2].float().contiguous() for x in self._tables())
        layer = LayerAttention(channels=heavy)
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, self._eps, cos, sin, (layer,), texts, policy)
        self.caches = []
        for _ in range(copies):
            keys, values = (torch.randn(room, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            dense = AttentionParameters(shape, layer, keys, values)
            self.caches.append(double_sparsity.double_sparsity_parameters(dense, heavy, policy))
        self.label()
        self._last = torch.full((texts,), tokens - 1, dtype=torch.int32, device="cuda")
        self.ids = torch.zeros(texts, dtype=torch.int64, device="cuda")
        self._qkv = [torch.cat([getattr(b.self_attn, f"{p}_proj").weight for p in "qkv"]) for b in model.model.layers]
        self._gate_up = [torch.cat([b.mlp.gate_proj.weight, b.mlp.up_proj.weight]) for b in model.model.layers]
        self._cos, self._sin = (x[:, tokens - 1, None, None] for x in self._tables())

    def label(self) -> None:
        """Label the keys that are cached."""
        for of in self.caches:
            start = torch.zeros(self.texts, dtype=torch.int32, device="cuda")
            double_sparsity.label_append(of, 0, self.tokens, positions=start)

    @torch.no_grad()
    def step(self, attention: str) -> Tensor:
        """Put a step on the current stream, attention "sparse", "dense" or torch's: logits [texts, vocabulary]."""
        inner = self._model.model
        x = inner.embed_tokens(self.ids)
        for number, block in enumerate(inner.layers):
            qkv = F.linear(self._norm(x, block.input_layernorm), self._qkv[number])
            x = x + block.self_attn.o_proj(self._attend(number, qkv, attention))
            gate, up = F.linear(self._norm(x, block.post_attention_layernorm), self._gate_up[number]).chunk(2, -1)
            x = x + block.mlp.down_proj(F.silu(gate) * up)
        return self._model.lm_head(self._norm(x, inner.norm))

    def step_bytes(self, sparse: bool) -> int:
        """What a step has to read: weights, and keys and values or labels and the selected ones."""
        weights = sum(p.numel() for name, p in self._model.named_parameters() if "embed" not in name) * 2
        if not sparse:
            return weights + self.cache_bytes
        rows = self.texts * self._shape[1] * self._model.config.num_hidden_layers
        read = self.policy.budget(self.tokens) * 4 * HEAD_DIM + self.tokens * (CHANNELS // 2 + 2)
        return weights + rows * read

    def _attend(self, number: int, qkv: Tensor, attention: str) -> Tensor:
        of = self.caches[number % len(self.caches)]
        if attention == "torch":
            return self._torchs(of.dense, qkv)
        out = torch.empty(self.texts, self._shape[0] * HEAD_DIM, device="cuda")
        if attention == "sparse":
            double_sparsity.attend(of, qkv.float(), self._last, out)
        else:
            dense_attention.attend(of.dense, qkv.float(), self._last, out)
        return out.bfloat16()

    def _torchs(self, of: AttentionParameters, qkv: Tensor) -> Tensor:
        heads, kv_heads = self._shape
        q, k, v = qkv.view(self.texts, -1, 1, HEAD_DIM).split([heads, kv_heads, kv_heads], dim=1)
        q, k = (x * self._cos + _half_rotated(x) * self._sin for x in (q, k))
        of.keys[:, :, -1:], of.values[:, :, -1:] = k, v
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(q, of.keys, of.values, enable_gqa=heads != kv_heads)
        return y.transpose(1, 2).reshape(self.texts, -1)

    def _tables(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.tokens, device="cuda")[None]
        cos, sin = self._model.model.rotary_emb(torch.empty(1, device="cuda", dtype=torch.bfloat16), positions)
        return cos, sin

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, self._eps)


def _half_rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def stock_model(layers: int) -> Any:
    """A Llama-2-7B of the stock library with random weights in BF16, on the GPU."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = llama_config(LLAMA_7B, num_hidden_layers=layers, max_position_embeddings=32768, dtype=torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def check(texts: int = 2, tokens: int = 700) -> None:
    """RuntimeError unless a decoder of two layers computes what the stock model does."""
    model = stock_model(2)
    ids = torch.randint(model.config.vocab_size, (texts, tokens), device="cuda")
    expected = model(ids).logits[:, -1].float()
    every = replace(POLICY, tokens=Fraction(1))
    decoder = Decoder(model, texts, tokens, every)
    cache = model(ids[:, :-1]).past_key_values
    for number, of in enumerate(decoder.caches):
        of.dense.keys[:, :, :-1], of.dense.values[:, :, :-1] = cache.layers[number].keys, cache.layers[number].values
    decoder.label()
    decoder.ids.copy_(ids[:, -1])
    for attention in ("torch", "dense", "sparse"):
        check_close(f"{attention}, logits", relative_error(decoder.step(attention).float(), expected), LIMIT)


def measure(model: Any, texts: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step of the BF16 decoder."""
    decoder = Decoder(model, texts, tokens)
    runs = {way: graph_seconds(lambda _, way=way: decoder.step(way), 1) for way in ("sparse", "dense", "torch")}
    return {
        "texts": texts,
        "tokens": tokens,
        "cache_bytes": decoder.cache_bytes,
        "bytes": decoder.step_bytes(True),
        "dense_bytes": decoder.step_bytes(False),
        "seconds": interleaved(runs, rounds),
    }


def measure_engine(packed: Any, texts: int, tokens: int, rounds: int, steps: int = 32) -> dict[str, Any]:
    """Seconds of a step of the engine, dense and sparse in turns."""
    vocabulary, room = packed.architecture.vocabulary, tokens + (rounds + 1) * 2 * steps
    prompts = [random_ids(vocabulary, tokens, seed=n) for n in range(texts)]
    engine = Engine(packed, device="cuda", context=room, sequences=texts)
    for n, prompt in enumerate(prompts):
        engine.prefill(prompt, n)

    def timed(dense: bool) -> float:
        engine.dense = dense
        torch.cuda.synchronize()
        start = time.perf_counter()
        for id in range(steps):
            engine.step_all([id] * texts)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    seconds = interleaved({"dense": partial(timed, True), "sparse": partial(timed, False)}, rounds, warm_up=1)
    return {"texts": texts, "tokens": tokens, "seconds": seconds}


def row_of(result: dict[str, Any], bandwidth: float) -> list[str]:
    """A line of the BF16 decoder's table."""
    seconds = result["seconds"]
    best = min(seconds["dense"], seconds["torch"])
    return [
        str(result["texts"]),
        str(result["tokens"]),
        f"{result['cache_bytes'] / 1e9:.1f}",
        f"{seconds['torch'] * 1e3:.2f}",
        f"{seconds['dense'] * 1e3:.2f}",
        f"{seconds['sparse'] * 1e3:.2f}",
        f"{best / seconds['sparse']:.2f}",
        f"{result['dense_bytes'] / result['bytes']:.2f}",
        f"{result['bytes'] / bandwidth / seconds['sparse']:.0%}",
        f"{result['texts'] / seconds['sparse']:.0f}",
    ]


@click.command()
@click.option("--quick", is_flag=True, help="Fewer texts and rounds.")
@json_option
def main(quick: bool, json_path: Path | None) -> None:
    """Print the tables."""
    bandwidth, rounds = announced_bandwidth(f"; {LLAMA_7B.name}"), 3 if quick else 7
    check()
    model, results = stock_model(LLAMA_7B.layers), []
    for case in CASES[::2] if quick else CASES:
        results.append(measure(model, *case, rounds))
        torch.cuda.empty_cache()
    head = ["texts", "tokens", "GB of keys and values", "torch's dense, ms", "our dense", "sparse", "x", "fewer bytes"]
    head += ["of bound", "t/s"]
    click.echo(f"\nBF16, {sum(p.numel() for p in model.parameters()) * 2 / 1e9:.1f} GB of weights\n")
    click.echo(markdown(Table(head, [row_of(result, bandwidth) for result in results])))
    del model
    torch.cuda.empty_cache()

    heavy = torch.arange(CHANNELS).expand(LLAMA_7B.kv_heads, -1)
    packed = random_model(LLAMA_7B)
    packed = replace(packed, attention=SparseAttention(POLICY, (heavy,) * LLAMA_7B.layers))
    engines = [measure_engine(packed, *case, rounds) for case in (ENGINE_CASES[1:2] if quick else ENGINE_CASES)]
    lines = [
        [
            *(str(result["texts"]), str(result["tokens"])),
            *(f"{result['seconds'][mode] * 1e3:.2f}" for mode in ("dense", "sparse")),
            f"{result['seconds']['dense'] / result['seconds']['sparse']:.2f}",
            f"{result['texts'] / result['seconds']['sparse']:.0f}",
        ]
        for result in engines
    ]
    click.echo("\nQ4_K, the engine\n")
    click.echo(markdown(Table(["texts", "tokens", "dense, ms", "sparse", "x", "t/s"], lines)))
    found = {"device": device_line(), "bandwidth": bandwidth, "bf16": results, "engine": engines}
    write_figures(json_path, found)
