"""What a calibration or a trace was made of, as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any


def calibration_table(manifest: Mapping[str, Any]) -> str:
    """What a calibration was made of."""
    tokens = manifest["tokens"]
    return _made_from(
        manifest,
        {
            "windows": f"{tokens['windows']} of {tokens['context']} tokens",
            "counted": f"{tokens['counted']:,} tokens; left out: {tokens['sinks_left_out']:,} sinks, "
            f"{tokens['padding_left_out']:,} padding",
            "held out": f"{tokens.get('held_out', 0)} windows, on which pack scores what is lost",
        },
    )


def trace_table(manifest: Mapping[str, Any]) -> str:
    """What a trace was made of."""
    rule, sessions = manifest["rule"], manifest["sessions"]
    documents = sum(row["document"] is not None for row in sessions)
    lengths = sorted({row["tokens"] for row in sessions})
    prompts = sorted({row["prompt"] for row in sessions})
    unit = "experts" if rule["active"] == "routed" else "neurons"
    which = {"nonzero": "not zero", "routed": "those that the router gives a token to"}.get(rule["active"])
    which = which or f"above a threshold that {100 * rule['share']:g} % pass"
    return _made_from(
        manifest,
        {
            "sessions": f"{len(sessions)} of {_range(lengths)} tokens, the first {_range(prompts)} of them prompt; "
            f"{documents} from the middle of a document of their own",
            unit: f"{manifest['intermediate']:,} in a block; active: {which}",
        },
    )


def _made_from(manifest: Mapping[str, Any], between: Mapping[str, str]) -> str:
    """A line each: the model and the text of a manifest, what is `between`, and the types that were computed in."""
    model = manifest["model"]
    values = {
        "model": f"{model['name']} ({model['model_type']}, {model['layers']} blocks, {model['sha256'][:12]})",
        "text": "; ".join(f"{t['name']} ({t['documents']} documents)" for t in manifest["texts"]),
        **between,
        "computed in": precision(manifest["compute"]),
    }
    width = max(map(len, values))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in values.items())


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def precision(compute: Mapping[str, Any]) -> str:
    """The type that was computed in, the device, and the type of the stored weights."""
    return f"{compute['dtype']} on {compute['device']}; weights stored in {compute['weights']}"
