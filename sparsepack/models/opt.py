"""OPT: learned positions, norms that subtract the mean, and MLPs without a gate. No engine runs it; everything that
works on the stock model works with it."""

from types import MappingProxyType

from sparsepack.models.family import Family
from sparsepack.models.parts import PROJECTIONS, LearnedPositions

FAMILIES = (
    Family(
        "opt",
        projections=MappingProxyType(
            {**PROJECTIONS, "attn_out": ("self_attn.out_proj",), "mlp_in": ("fc1",), "mlp_mid": ("fc2",)}
        ),
        norms=MappingProxyType({"attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}),
        rotary="none",
        backbone="model.decoder",
        widening="project_in",
        positions=LearnedPositions("embed_positions", 2),
        after=("final_layer_norm", "project_out"),
        fields=MappingProxyType(
            {
                "intermediate_size": "ffn_dim",
                "hidden_act": "activation_function",
                "num_key_value_heads": "num_attention_heads",
            }
        ),
        unpackable="learned positions, norms that subtract the mean, and an MLP without a gate",
        residual=None,
        unrotatable="its norms subtract the mean, which is not the same in another basis",
    ),
)
