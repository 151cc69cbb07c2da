"""MLPs by neurons in a manifest: the section `neurons`, of formats that store them so.

calibration   SHA-256 of the one that counted how often each neuron was active; or
trace         the same of a trace, of all its sessions
tokens        that were counted
density       of each layer, the share of its neurons that a token needed
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from sparsepack.errors import ArtifactError
from sparsepack.files.stored import Name, Size, Stored, checked, shown
from sparsepack.formats.manifest import NEURONS
from sparsepack.models.records.neurons import NeuronCounts

_Share = Annotated[float, Field(ge=0, le=1)]


class NeuronSection(Stored):
    """What a manifest says of neurons."""

    calibration: Name | None = None
    trace: Name | None = None
    tokens: Size
    density: Annotated[list[_Share], Field(min_length=1)]


def neuron_section(counts: NeuronCounts) -> dict[str, Any]:
    """The section of a model whose neurons were counted, JSON-able."""
    return {counts.origin: counts.sha256, "tokens": counts.tokens, "density": counts.density}


def read_neuron_section(manifest: Mapping[str, Any], where: object) -> NeuronSection:
    """What a manifest says of neurons. Raises `ArtifactError` where that is missing or not understood."""
    try:
        section = checked(NeuronSection, manifest.get(NEURONS))
        if (section.calibration is None) == (section.trace is None):
            raise ValueError("expected the hash of either a calibration or a trace")
        return section
    except ValueError as error:
        raise ArtifactError(f"{where}: {NEURONS}: {shown(error)}; pack the model again") from error


def neuron_summary(manifest: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The section, JSON-able, with the mean of the layers and all of it in words. Raises as `read_neuron_section`."""
    section = read_neuron_section(manifest, where)
    density = section.density
    origin = "trace" if section.calibration is None else "calibration"
    mean = sum(density) / len(density)
    words = (
        f"{100 * mean:.1f} % of them were active at a token of the {origin} ({section.tokens:,} tokens; by layer "
        f"{100 * min(density):.1f} to {100 * max(density):.1f} %); decoding reads the records of active ones alone"
    )
    return {**section.model_dump(exclude_none=True), "mean_density": mean, "in_words": words}
