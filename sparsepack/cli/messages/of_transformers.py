"""What transformers says that is for the makers of a model, and not for those who run it."""

import logging

_FOR_MAKERS = "This model config has set a `rope_parameters['original_max_position_embeddings']` field"
"""Every Phi whose texts may be long has it, as its makers stored it."""


def concerns_the_user(record: logging.LogRecord) -> bool:
    """A filter of a logger: whether to show what it was told."""
    return _FOR_MAKERS not in record.getMessage()
