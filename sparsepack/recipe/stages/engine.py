"""What the sections share that run the artifact by an engine."""

from collections.abc import Iterator

from sparsepack.errors import UserError
from sparsepack.formats.table import FORMATS, those_with
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stages.pack import Pack, mlp_kind
from sparsepack.recipe.stages.thresholds import ActivationSparsity, sparse
from sparsepack.runtime.backends import BACKENDS, backend_for
from sparsepack.runtime.options import EngineOptions


def engine_options(recipe: Recipe, section: Section) -> EngineOptions:
    """What a section tells the engine: its other keys that `EngineOptions` have. Raises `UserError` as those do."""
    own = section.told(section.options)
    told = {name: value for name, value in section.told(EngineOptions).items() if name not in own}
    return EngineOptions(device=recipe.device, **told)


def engine_problems(recipe: Recipe, section: Section) -> Iterator[str]:
    """What is wrong with what a section tells the engine."""
    try:
        options = engine_options(recipe, section)
    except UserError as error:
        yield f"{section.key}: {error}"
        return
    row, name = backend_for(recipe.device), options.divided_by
    if name and not mlp_kind(recipe).by_count:
        able = those_with("mlp.by_count")
        yield f"{section.key}.{name}: the artifact's MLPs are not stored by neurons; expected pack.format {able}"
    if name and not row.divides(name):
        able = " or ".join(each.devices[0] for each in BACKENDS.values() if each.devices and each.divides(name))
        yield f"{section.key}.{name}: the {row.name} backend does not divide neurons so; expected device {able}"
    if options.hold and not sparse(recipe):
        key = ActivationSparsity.key
        yield f"{section.key}.hold: nothing is skipped whose share could be held; expected {key}.sparsity above 0"


def needs_engine(name: str, recipe: Recipe) -> Iterator[str]:
    """What is wrong where a stage runs the artifact and there is none to run."""
    section = Pack.find_in(recipe)
    if section is None or not FORMATS[section.format].runs:
        yield f"{name}: it runs an artifact; expected a pack section of format {those_with('runs')}"
