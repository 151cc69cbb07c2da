"""What `sparsepack tune` measured of the links: a file for each machine, number of threads and width of records."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from sparsepack.files.atomic import write_json
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.hybrid.measure import MeasuredLinks
from sparsepack.runtime.tuning import check_room, tuned_path

SCHEMA = 5


def links_path(of: Mapping[str, Any]) -> Path:
    """The file that keeps links. of -- what they depend on: the machine, threads, width."""
    return tuned_path("links", SCHEMA, *of.values())


def keep_links(of: Mapping[str, Any], measured: MeasuredLinks) -> dict[str, Any]:
    """Keep what was measured; returns it as JSON-able values, with its `path`. Raises `OutputError`."""
    path = links_path(of)
    content = {"schema": SCHEMA, **of, **asdict(measured)}
    write_json(path, content)
    return {**content, "path": str(path)}


def measure_and_keep(
    wanted: Iterable[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], MeasuredLinks]
) -> list[dict[str, Any]]:
    """Measure each of those that are wanted, once, keep it, and return what was found, JSON-able.

    Raises `OutputError` where it cannot be kept, before anything is measured.
    """
    once = list({links_path(of): of for of in wanted}.values())
    for of in once:
        check_room(links_path(of), 1)
    return [keep_links(of, measure(of)) for of in once]


def kept_links(of: Mapping[str, Any]) -> BandwidthProfile | None:
    """What was measured. A file that is missing, damaged, of another schema or of another machine holds nothing."""
    try:
        content = json.loads(links_path(of).read_text())
        links = BandwidthProfile(
            **{field.name: float(content["together"][field.name]) for field in fields(BandwidthProfile)}
        )
        known = {key: content[key] for key in ("schema", *of)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    speeds = astuple(links)
    return links if known == {"schema": SCHEMA, **of} and all(0 < each < math.inf for each in speeds) else None
