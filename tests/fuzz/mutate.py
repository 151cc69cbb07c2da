"""Mutations: of bytes, of JSON values, of text. All that is random comes from the `Random` that is given."""

import copy
import json
from random import Random
from typing import Any

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)

# What JSON can say and Python's encoder cannot: put in its place afterwards.
_RAW = {
    "@huge@": "9" * 5000,
    "@deep@": "[" * 3000 + "]" * 3000,
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@half@": '"\\ud800"',
}
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**62, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *("", "x", "x" * 300, "a\nb\n", "\0", "\x1b[31m", "../../../etc/passwd", "/dev/zero", "llama", "q4_k", "é☃𝄞"),
    *([], [None], [[]], [1, 2, 3], ["x"], {}, {"x": 1}, [{}]),
    *_RAW,
)


def bytes_changed(random: Random, data: bytes) -> bytes:
    """A few places changed, taken out, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        # Headers are where structure is: half of the changes fall into the first kilobyte.
        most = min(len(changed), 1024) if random.random() < 0.5 else len(changed)
        at = random.randrange(most) if most else 0
        size = random.choice((1, 2, 4, 8, 64))
        kind = random.randrange(7)
        if kind == 0 and changed:
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = bytes([random.randrange(256)])
        elif kind == 2:
            number = random.choice(_NUMBERS).to_bytes(8, "little")[: min(size, 8)]
            changed[at : at + len(number)] = number
        elif kind == 3:
            del changed[at : at + size]
        elif kind == 4:
            changed[at:at] = bytes(changed[at : at + size])
        elif kind == 5:
            other = random.randrange(len(changed)) if changed else 0
            changed[at : at + size] = changed[other : other + size]
        elif random.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def json_changed(random: Random, text: str) -> str:
    """A JSON text with a few values replaced, removed, renamed, repeated or exchanged; sometimes with broken text."""
    broken = random.random() < 0.1
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # of an earlier change
        broken = True
    if broken:
        return bytes_changed(random, text.encode("utf-8", "replace")).decode(errors="replace")
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _value_changed(random, value)
    made = json.dumps(value, ensure_ascii=random.random() < 0.5)
    for name, raw in _RAW.items():
        made = made.replace(f'"{name}"', raw)
    return made


def _value_changed(random: Random, value: Any) -> Any:
    places = list(_places(value))
    if not places or random.random() < 0.02:
        return _any_value(random)
    # Deep places are many; choose a depth first, so that those at the top get their share.
    depth = random.choice(sorted({depth for depth, _, _ in places}))
    _, holder, key = random.choice([place for place in places if place[0] == depth])
    kind = random.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[random.choice(("x", "", f"{key}s", *(other for other in holder)))] = holder.pop(key)
    elif kind == 2:
        _, other, there = random.choice(places)
        holder[key] = (
            other[there] if not isinstance(other[there], (dict, list)) else json.loads(json.dumps(other[there]))
        )
    elif kind == 3 and type(holder[key]) in (int, float):
        holder[key] = random.choice(
            (-holder[key], holder[key] + 1, holder[key] * 1000, str(holder[key]), [holder[key]])
        )
    elif kind == 4 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    else:
        holder[key] = _any_value(random)
    return value


def _any_value(random: Random) -> Any:
    """A copy: a later change of it must not reach other cases, nor put a value into itself."""
    return copy.deepcopy(random.choice(_VALUES))


def _places(value: Any, depth: int = 0) -> Any:
    """(depth, holder, key) of every value inside; of long lists the first ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for key, part in inner:
        yield depth, value, key
        yield from _places(part, depth + 1)
