"""The functions by which a decoder uses the GPU, in one record, so that tests can pass functions of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.runtime.cuda.attention import attention, delta_net, double_sparsity, latents, mamba, short_conv
from sparsepack.runtime.cuda.decoder import step_end
from sparsepack.runtime.cuda.driver import device, kernel, memory
from sparsepack.runtime.cuda.driver.device import own_stream
from sparsepack.runtime.cuda.products import (
    experts,
    gate_copies,
    neurons,
    offloaded,
    rows,
    zigzag,
    zigzag_products,
)
from sparsepack.runtime.cuda.products import gemm_fp16 as dense
from sparsepack.runtime.generation.sampling import sample


class Kernels:
    """The functions that launch kernels, and what else a decoder needs of the device.

    Holds no state. It is a class, and no dataclass of callables, so that each call is checked against the signature of
    the real function; who wants others derives from it and replaces them (`tests/runtime/cuda/simulated.py`).
    """

    __slots__ = ()

    # The device: which one, what runs there in which order.
    usable = staticmethod(device.usable)
    on_device = staticmethod(torch.cuda.device)
    device_name = staticmethod(torch.cuda.get_device_name)
    capability = staticmethod(torch.cuda.get_device_capability)
    synchronize = staticmethod(torch.cuda.synchronize)
    new_stream = staticmethod(own_stream)
    on_stream = staticmethod(torch.cuda.stream)
    new_event = staticmethod(torch.cuda.Event)
    new_graph_pool = staticmethod(torch.cuda.graph_pool_handle)
    compile_together = staticmethod(kernel.compile_together)
    capture_graph = staticmethod(device.capture_graph)
    replay = staticmethod(device.replay)

    # Loading.
    load_zigzag = staticmethod(zigzag.load_zigzag)
    first_bands = staticmethod(offloaded.first_bands)
    counting_rest = staticmethod(offloaded.counting_rest)
    rest_of_first_bands = staticmethod(offloaded.rest_of_first_bands)
    load_rows = staticmethod(rows.load_rows)
    load_rows_fp16 = staticmethod(rows.load_rows_fp16)
    load_experts = staticmethod(experts.load_experts)
    load_neurons = staticmethod(neurons.load_neurons)
    new_neurons = staticmethod(neurons.new_neurons)
    copy_neurons = staticmethod(neurons.copy_neurons)
    load_gate_copy = staticmethod(gate_copies.load_gate_copy)

    double_sparsity_parameters = staticmethod(double_sparsity.double_sparsity_parameters)
    delta_net_parameters = staticmethod(delta_net.delta_net_parameters)
    mamba_parameters = staticmethod(mamba.mamba_parameters)
    short_conv_parameters = staticmethod(short_conv.short_conv_parameters)
    host_tensors = staticmethod(memory.host_tensors)
    shared_memory = staticmethod(memory.shared_memory)
    on_card = staticmethod(memory.on_card)
    apart_on_card = staticmethod(memory.apart_on_card)
    in_host_memory = staticmethod(memory.in_host_memory)
    token_slots = staticmethod(double_sparsity.token_slots)

    # Steps.
    flag_in_data_buffers = staticmethod(memory.flag_in_data_buffers)
    blocks = staticmethod(zigzag_products.blocks)
    most_inputs = staticmethod(zigzag_products.most_inputs)
    new_candidates = staticmethod(rows.new_candidates)
    embed = staticmethod(rows.embed)
    gemv = staticmethod(zigzag_products.gemv)
    batch = staticmethod(zigzag_products.batch)
    multiply_offloaded = staticmethod(offloaded.multiply)
    count_step = staticmethod(offloaded.count_step)
    attend = staticmethod(attention.attend)
    attend_double_sparsity = staticmethod(double_sparsity.attend)
    delta_step = staticmethod(delta_net.delta_step)
    mamba_step = staticmethod(mamba.mamba_step)
    short_conv_step = staticmethod(short_conv.short_conv_step)
    attend_offloaded = staticmethod(double_sparsity.attend_offloaded)
    label_append = staticmethod(double_sparsity.label_append)
    post_norm = staticmethod(dense.post_norm)
    layer_norm = staticmethod(dense.layer_norm)
    gate_inputs = staticmethod(dense.gate_inputs)
    activation_norm = staticmethod(dense.activation_norm)
    norm_rows = staticmethod(dense.norm_rows)
    norm_latents = staticmethod(dense.norm_latents)
    join_latents = staticmethod(latents.join_latents)
    latent_queries = staticmethod(latents.latent_queries)
    latent_outputs = staticmethod(latents.latent_outputs)
    route = staticmethod(experts.route)
    expert_blocks = staticmethod(experts.blocks)
    multiply_experts = staticmethod(experts.multiply_experts)
    new_active_neurons = staticmethod(neurons.new_active_neurons)
    list_neurons = staticmethod(neurons.list_neurons)
    add_neurons = staticmethod(neurons.add_neurons)
    score_neurons = staticmethod(gate_copies.score_neurons)
    multiply_listed = staticmethod(gate_copies.multiply_listed)
    keep_active = staticmethod(gate_copies.keep_active)
    product = staticmethod(rows.product)
    pick_likeliest = staticmethod(step_end.pick_likeliest)
    sample = staticmethod(sample)

    # Prefill.
    new_scratch = staticmethod(dense.new_scratch)
    to_scaled_fp16 = staticmethod(dense.to_scaled_fp16)
    multiply = staticmethod(dense.multiply)
    multiply_rows = staticmethod(dense.multiply_rows)
    norm_prefill_rows = staticmethod(dense.norm_prefill_rows)
    split_heads = staticmethod(dense.split_heads)
    prefill_attention = staticmethod(attention.prefill_attention)
    delta_prefill = staticmethod(delta_net.delta_prefill)
    mamba_prefill = staticmethod(mamba.mamba_prefill)
    short_conv_prefill = staticmethod(short_conv.short_conv_prefill)
    gated = staticmethod(dense.gated)
    order_by_expert = staticmethod(experts.order_by_expert)
    multiply_grouped = staticmethod(experts.multiply_grouped)
    decode_experts = staticmethod(experts.decode_experts)
    new_products = staticmethod(dense.new_products)
    neurons_at_once = staticmethod(neurons.neurons_at_once)
    multiply_neurons = staticmethod(neurons.multiply_neurons)
    multiply_gates = staticmethod(gate_copies.multiply_gates)
    add = staticmethod(dense.add)
    matmul = staticmethod(rows.matmul)

    @staticmethod
    def new_step_stream() -> torch.cuda.Stream:
        """A stream whose kernels, replayed from a graph too, come before those of other streams where they compete for
        multiprocessors."""
        return own_stream(priority=-1)

    @staticmethod
    def wait_for_step() -> None:
        """The host waits until what is on the current stream has ended; other streams may go on."""
        torch.cuda.current_stream().synchronize()

    @staticmethod
    def host_memory(like: Tensor) -> Tensor:
        """The host's memory in which the host reads what lies on the GPU: copies to this memory need not be waited for
        one by one."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    @staticmethod
    def host_values(values: Sequence[int]) -> Tensor:
        """int32 that a GPU copies without the host waiting; torch keeps the memory until that is done."""
        return torch.tensor(values, dtype=torch.int32, pin_memory=True)


KERNELS = Kernels()
