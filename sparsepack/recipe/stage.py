"""What a stage of a recipe is, and the recipe on its way through them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.errors import TextError, UserError
from sparsepack.operation import Cost
from sparsepack.recipe.section import Recipe
from sparsepack.tables import Part

if TYPE_CHECKING:
    from sparsepack.files.text import Text
    from sparsepack.models.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """A recipe on its way: the model opened, the texts as far as they were asked for, the folder of the outputs.

    made    -- name in that folder of the model, where a stage made it from the recipe's (`Stage.makes`); else empty
    before  -- the job as that stage saw it
    records -- by stage, those of models that are still to be made (`Stage.predict`)
    """

    recipe: Recipe
    checkpoint: "Checkpoint"
    folder: Path
    made: str = ""
    before: "Job | None" = None
    records: Mapping[str, Any] = field(default_factory=dict)
    _texts: dict[tuple[str, ...], "Text"] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model, as `open_checkpoint` takes it."""
        return str(self.folder / self.made) if self.made else self.recipe.model

    def behind(self, stage: "Stage") -> "Job":
        """The job as the stages behind a finished one see it."""
        from sparsepack.models.checkpoint.checkpoint import open_checkpoint

        if not stage.makes:
            return self
        # Not by its path: a work folder may be moved, and two runs of one recipe leave the same bytes.
        named = f"{self.checkpoint.name}, {stage.makes}"
        checkpoint = replace(open_checkpoint(self.folder / stage.makes), name=named)
        return replace(self, checkpoint=checkpoint, made=stage.makes, before=self)

    def ahead_of(self, stage: "Stage") -> "Job":
        """The job as the stages behind one that has not run may reckon with it."""
        if stage.predict is None or not stage.runs(self.recipe):
            return self
        checkpoint, record = stage.predict(self, self.recipe.section(stage.key))
        return replace(self, checkpoint=checkpoint, records={**self.records, stage.name: record})

    def text(self, names: Sequence[str], key: str = "") -> "Text":
        """Several texts as one, read once. Raises `TextError` where one cannot be, naming the recipe's `key`."""
        from sparsepack.files.text import read_text

        section = tuple(names)
        if section not in self._texts:
            try:
                self._texts[section] = read_text(section)
            except TextError as error:
                where = f"{key}: " if key else ""
                raise TextError(f"{where}{error}{f'; for a text of yours: --set {key}=FILE' if key else ''}") from error
        return self._texts[section]

    def windows_of(self, names: Sequence[str], context: int, most: int | None) -> int:
        """Windows of a text that are run: all there are, or `most` of them (None or 0: all)."""
        from sparsepack.models.tokenizer.windows import count_windows

        return count_windows(self.checkpoint.tokenizer, self.text(names), context, most or None)

    def too_long(self, name: str, tokens: int | None) -> Iterator[str]:
        """What is wrong with so many tokens at a time, if they are more than the model was made for."""
        longest = int(self.checkpoint.config.max_position_embeddings)
        if tokens is not None and tokens > longest:
            yield f"{name}: {tokens} tokens; {self.checkpoint.name} was made for at most {longest}"


def _nothing(*_: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Stage:
    """One stage: what it is asked, when it is run again, what it does, what it says.

    Its functions get its part of the recipe as `section`, and are only called where the recipe has it.

    key, type, default -- of that part: `type` is what pydantic takes, a section or a plain type
    needs    -- the stages that its outputs are made from, besides those that make the model
    makes    -- the name of an output that is a checkpoint and, from then on, the model of all stages behind it
    predict  -- that model and its record, as far as they are known before it is made; None: it makes none
    outputs  -- the files and folders that it leaves, relative to the work folder, by its section
    settings -- everything that its outputs depend on besides `needs`, the model, device and dtype; JSON-able. By itself
                its section
    run      -- from the recipe and files in the work folder to files in the work folder
    wanted   -- whether it runs where its section is there
    problems -- what does not go together in the recipe, a sentence each, found before anything is opened
    misfits  -- what the model or a text does not allow, likewise; raises `UserError` where one cannot be read
    cost     -- of the dry run: what it takes
    plan     -- more of the dry run, JSON-able, by key; called with None where the recipe has no such part
    show_plan -- that as lines and tables
    result   -- key in the report, how it is read from the work folder, and its value where the stage is left out
    show     -- lines and tables of the report
    """

    name: str
    key: str
    type: Any
    outputs: Callable[[Any], tuple[str, ...]]
    run: Callable[[Job, Any], None]
    settings: Callable[[Job, Any], Mapping[str, Any]] = lambda job, section: section.model_dump(mode="json")
    default: Any = None
    needs: tuple[str, ...] = ()
    makes: str = ""
    predict: "Callable[[Job, Any], tuple[Checkpoint, Any]] | None" = None
    wanted: Callable[[Recipe, Any], bool] = lambda recipe, section: True
    problems: Callable[[Recipe, Any], Iterable[str]] = _nothing
    misfits: Callable[[Job, Any], Iterable[str]] = _nothing
    cost: Callable[[Job, Any], Cost] = lambda job, section: Cost()
    plan: Callable[[Job, Any], Mapping[str, Any]] = lambda job, section: {}
    show_plan: Callable[[Mapping[str, Any]], Iterable[Part]] = _nothing
    result: tuple[str, Callable[[Path], Any], Any] | None = None
    show: Callable[[Mapping[str, Any]], Iterable[Part]] = _nothing

    def runs(self, recipe: Recipe) -> bool:
        """Whether the recipe asks for it."""
        section = recipe.section(self.key)
        return bool(section) and self.wanted(recipe, section)


def leaves(*names: str) -> Callable[[Any], tuple[str, ...]]:
    """The outputs of a stage that leaves the same files whatever is asked."""
    return lambda section: names


def read_json(name: str) -> Callable[[Path], Any]:
    """How a result is read that lies in the work folder as JSON."""
    import json

    return lambda folder: json.loads((folder / name).read_text(encoding="utf-8"))


def refusals(key: str, *checks: Callable[[], Any]) -> Iterator[str]:
    """What the first check says that raises `UserError`, as a line about a section."""
    try:
        for check in checks:
            check()
    except UserError as error:
        yield f"{key}: {error}"
