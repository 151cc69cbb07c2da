"""The random checkpoints that the tests of models run on: arguments of `models_for_tests.make_model`."""

FOLDERS = {
    "llama": {"family": "llama"},
    "llama, biases": {"family": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama, tied, llama3 rotary": {
        "family": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral, sliding window": {"family": "mistral", "sliding_window": 7},
    "mistral, no window": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen2, every second layer slides": {
        "family": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3, tied, wide heads": {"family": "qwen3"},
    "phi3, longrope": {
        "family": "phi3",
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.1, 2.2],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
        },
    },
}
