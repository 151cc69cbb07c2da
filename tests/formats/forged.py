"""Files with intact hashes that say something else."""

import dataclasses
import json
from typing import Any

from sparsepack.formats.plan import Plan, PlannedGroup


def forge(plan: Plan, **changes: Any) -> Plan:
    """A plan with other fields, whose artifact gets its name even if no reader takes it."""
    return dataclasses.replace(plan, check=lambda *_: None, **changes)


def edited(values: dict[str, Any], key: str, **changes: Any) -> dict[str, Any]:
    """The pairs of a GGUF with other values in the JSON object that stands under `key`."""
    text, *rest = values[key]
    return values | {key: (json.dumps(json.loads(text) | changes), *rest)}


def named(group: PlannedGroup, name: str) -> PlannedGroup:
    """A tensor that is made alone, under another name."""
    (tensor,) = group.tensors
    return dataclasses.replace(group, tensors=(dataclasses.replace(tensor, name=name),))
