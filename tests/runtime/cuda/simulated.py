"""Kernels of the cuda backend in plain torch on the CPU, so that the chain of a decoder can be tested without a GPU.

`KERNELS` is what a decoder takes; each function stands in for the one of its name. Those that it leaves as they are run
under `launches`: what they launch is computed by `simulated_launches.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import simulated_between as between
import simulated_delta_net as delta_net
import simulated_double_sparsity as double_sparsity
import simulated_experts as experts
import simulated_mamba as mamba
import simulated_products as products
import simulated_short_conv as short_conv
import torch
from simulated_launches import kernel, launch
from simulated_words import BUFFERS, flag_in_data_buffers, real_flag_in_data_buffers

from sparsepack.runtime.cuda.driver import device, kernel_set
from sparsepack.runtime.cuda.driver.memory import WORKSPACE_WORDS
from sparsepack.runtime.cuda.products import gate_copies, neurons, offloaded, tile_config, zigzag, zigzag_products
from sparsepack.runtime.cuda.products import gemm_fp16 as dense

CPU = torch.device("cpu")
MULTIPROCESSORS, SHARED_MEMORY = 132, 227 << 10  # as an H100 has them


class Graph:
    """What was captured runs again, from the memory as it is then."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Event:
    """All that ran before it is over when it is recorded."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def wait(self) -> None:
        """For one that was never recorded nobody waits."""

    def query(self) -> bool:
        return self.at > 0

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


def capture_graph(run: Callable[[], None], stream: Any, pool: Any = None) -> Graph:
    run()
    return Graph(run)


class SimulatedKernels(kernel_set.Kernels):
    usable = staticmethod(lambda device: CPU)
    on_device = staticmethod(nullcontext)
    device_name = staticmethod(lambda device: "simulated")
    capability = staticmethod(lambda device: (9, 0))
    synchronize = staticmethod(lambda device: None)
    new_stream = new_step_stream = new_graph_pool = wait_for_step = staticmethod(lambda: None)
    on_stream = staticmethod(lambda stream: nullcontext())
    on_card = in_host_memory = staticmethod(lambda loaded: loaded)
    apart_on_card = staticmethod(lambda: lambda loaded: loaded)
    new_event = staticmethod(lambda enable_timing=False: Event())
    host_memory = staticmethod(torch.empty_like)
    host_values = staticmethod(lambda values: torch.tensor(values, dtype=torch.int32))
    compile_together = staticmethod(lambda run: None)
    capture_graph = staticmethod(capture_graph)
    replay = staticmethod(lambda graph: graph.replay())
    load_zigzag = staticmethod(products.load_zigzag)
    first_bands = staticmethod(products.first_bands)
    counting_rest = staticmethod(products.counting_rest)
    rest_of_first_bands = staticmethod(products.rest_of_first_bands)
    load_rows = staticmethod(products.load_rows)
    load_rows_fp16 = staticmethod(products.load_rows_fp16)
    flag_in_data_buffers = staticmethod(flag_in_data_buffers)
    new_candidates = staticmethod(products.new_candidates)
    embed = staticmethod(products.embed)
    gemv = staticmethod(products.gemv)
    load_experts = staticmethod(experts.load_experts)
    route = staticmethod(experts.route)
    order_by_expert = staticmethod(experts.order_by_expert)
    multiply_grouped = staticmethod(experts.multiply_grouped)
    decode_experts = staticmethod(experts.decode_experts)
    new_products = staticmethod(lambda x, weights: x.float() @ weights.float())
    expert_blocks = staticmethod(experts.expert_blocks)
    multiply_experts = staticmethod(experts.multiply_experts)
    attend = staticmethod(between.attend)
    delta_step = staticmethod(delta_net.delta_step)
    delta_prefill = staticmethod(delta_net.delta_prefill)
    mamba_step = staticmethod(mamba.mamba_step)
    mamba_prefill = staticmethod(mamba.mamba_prefill)
    short_conv_step = staticmethod(short_conv.short_conv_step)
    short_conv_prefill = staticmethod(short_conv.short_conv_prefill)
    post_norm = staticmethod(between.post_norm)
    layer_norm = staticmethod(between.layer_norm)
    activation_norm = staticmethod(between.activation_norm)
    norm_rows = staticmethod(between.norm_rows)
    norm_latents = staticmethod(between.norm_latents)
    join_latents = staticmethod(between.join_latents)
    latent_queries = staticmethod(between.latent_queries)
    latent_outputs = staticmethod(between.latent_outputs)
    norm_prefill_rows = staticmethod(between.norm_prefill_rows)
    double_sparsity_parameters = staticmethod(double_sparsity.double_sparsity_parameters)
    label_append = staticmethod(double_sparsity.label_append)
    attend_double_sparsity = staticmethod(double_sparsity.attend_double_sparsity)
    attend_offloaded = staticmethod(double_sparsity.attend_offloaded)
    host_tensors = staticmethod(lambda count, shape, *of: [torch.zeros(shape, dtype=of[0]) for _ in range(count)])
    shared_memory = staticmethod(lambda size, *of: ((memory := np.zeros(size, np.uint8)), torch.from_numpy(memory)))
    product = staticmethod(products.product)
    pick_likeliest = staticmethod(products.pick_likeliest)
    matmul = staticmethod(products.matmul)


KERNELS = SimulatedKernels()
WORKSPACE = real_flag_in_data_buffers([MULTIPROCESSORS * WORKSPACE_WORDS], CPU)[0]


@contextmanager
def launches() -> Iterator[None]:
    """Let functions that launch what is in `simulated_launches.LAUNCHED` run on the CPU."""
    BUFFERS.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (dense, offloaded, gate_copies, neurons, zigzag, zigzag_products):
            patch.setattr(module, "kernel", kernel)
            patch.setattr(module, "launch", launch)
        for module in (gate_copies, device, tile_config, zigzag_products):
            patch.setattr(module, "shared_limit", lambda device: SHARED_MEMORY)
        for module in (gate_copies, neurons, tile_config, zigzag, zigzag_products):
            patch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
        patch.setattr(neurons, "architecture", lambda device: 90)
        patch.setattr(zigzag_products, "workspace", lambda device: WORKSPACE)
        patch.setattr(dense, "dequantise", products.dequantise)
        patch.setattr(dense, "decode", products.decode)
        patch.setattr(dense, "_fp16_product", lambda x, weights, out: out.copy_(x.float() @ weights.float()))
        yield
