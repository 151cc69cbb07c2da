"""The model card of an artifact: a README.md for people and the hub, from its manifest and what was measured.

The templates of this folder, filled in. What comes from a manifest is data, as a stranger may have written it: in
HTML it is escaped; in Markdown it becomes code wherever it could be anything but plain words.

Results that were measured of an artifact, from the JSON files that `run`, `eval` and `bench` write.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsepack.bench.run import speed_table
from sparsepack.errors import UserError
from sparsepack.eval.results import accuracy_tables
from sparsepack.formats.inspect import describe
from sparsepack.formats.manifest import DISTILLATION, PRUNING, ROTATION
from sparsepack.inspection import programs_table, score_rows
from sparsepack.models.provenance import basis_in_words
from sparsepack.tables import Table, markdown
from sparsepack.terminal import printable
from sparsepack.version import __version__

_PLAIN = re.compile(r"(?!.*(://|www\.))[\w ,;:/%=()+±'.-]*", re.IGNORECASE)
"""Words of which no Markdown makes a link, a picture, HTML or emphasis; no address of a page or of mail is one."""


def render(template: str, **values: Any) -> str:
    """A template with these values: HTML by its name, else Markdown. `Markup` stands as it is.

    Raises `jinja2.UndefinedError` for a value that is missing.
    """
    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=PackageLoader("sparsepack.publish", "."),
        autoescape=html,
        finalize=None if html else _as_data,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": code, "shell": shell, "python": _python}
    return environment.get_template(template).render(**values)


def words(text: str) -> str:
    """A stranger's words for Markdown, in one line: as they are where they are plain, else as code."""
    line = _line(text)
    return line if _PLAIN.fullmatch(line) else str(code(line))


def code(text: Any) -> Markup:
    """A stranger's words as code within a line of Markdown, a cell of a table too: nothing in them counts."""
    line = _line(str(text)).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return Markup(f"{fence}{space}{line}{space}{fence}")


def shell(text: Any) -> Markup:
    """A stranger's words as one word of a command line that somebody may copy."""
    return Markup(shlex.quote(_line(str(text))))


def table(drawn: Table) -> Markup:
    """A table in Markdown whose cells may hold a stranger's words, as may what stands above and below it."""
    notes = ["\n".join(map(words, note.splitlines())) for note in drawn.notes]
    return Markup(markdown(Table(drawn.columns, drawn.rows, words(drawn.title), notes), cell=words))


def _python(text: Any) -> Markup:
    """A stranger's words as a string of a Python program that somebody may copy."""
    return Markup(json.dumps(_line(str(text)), ensure_ascii=False))


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _as_data(value: Any) -> Any:
    return Markup(words(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


REPORT, EVALUATION = "recipe report", "evaluation"


@dataclass(frozen=True)
class Results:
    """Evaluations as `eval --json` writes them, and tests as `bench --json` does."""

    evaluations: Sequence[Mapping[str, Any]] = ()
    bench: Mapping[str, Any] | None = None


def read_results(paths: Sequence[Path], description: Mapping[str, Any]) -> Results:
    """What the files hold about one artifact; of several benches the last.

    description -- the artifact, as `formats.inspect.describe` gives it

    Raises `UserError` for a file that is none of `run`, `eval` or `bench`, or about another model.
    """
    evaluations: list[Mapping[str, Any]] = []
    bench = None
    for path in paths:
        try:
            value = read_json(path)
            if value.get("kind") == REPORT:
                found, bench = value["evaluations"], value["bench"] or bench
            elif value.get("kind") == EVALUATION:
                found = [value]
            else:
                found, bench = [], {"tests": value["tests"], "runtime": value["runtime"]}
            for evaluation in found:
                _check_subject(path, evaluation["subject"], description)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: no result of ours ({error!r}); expected what `run`, `eval` or `bench` writes with --json"
            ) from error
        evaluations += found
    return Results(evaluations, bench)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises `UserError` where it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); expected a result that sparsepack wrote with --json") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: {type(value).__name__}, expected an object; give a result written with --json")
    return value


def _check_subject(path: Path, subject: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    model = description["provenance"]["model"]
    if subject["source_sha256"] != model["sha256"]:
        raise UserError(f"{path}: measured on another model than {description['path']} was made from; measure this one")
    if subject["kind"] != description["kind"]:
        raise UserError(
            f"{path}: measured on {subject['kind']}, {description['path']} is {description['kind']}; measure this one"
        )


MARK = "<!-- Made by `sparsepack card`. -->"
"""Every card that `sparsepack card` made has this line, and may be replaced by a new one; a card without the line was
written by hand."""


def model_card(path: Path, results: Sequence[Path] = (), name: str | None = None, *, file: str | None = None) -> str:
    """The card of the artifact at `path`, Markdown with the YAML head that the hub reads.

    results -- JSON files of `run`, `eval` or `bench`; without any, the card says how to measure
    name    -- its heading (default: the source model's name)
    file    -- what the artifact will be called (default: as it is now)

    Raises `UserError` for results that are damaged or of another model, `ArtifactError` where there is no artifact of
    ours.
    """
    description = describe(path)
    found = read_results(results, description)
    try:
        measured = [*accuracy_tables(found.evaluations)]
        speed = [speed_table(found.bench)] if found.bench else []
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files = ", ".join(map(str, results))
        raise UserError(f"{files}: damaged, or of another sparsepack ({error!r}); measure again") from error
    rotation = description["provenance"][ROTATION]
    return render(
        "card.md.jinja",
        mark=Markup(MARK),
        head=Markup(yaml.safe_dump(_head(description), sort_keys=False, allow_unicode=True)),
        heading=name or f"{Path(description['provenance']['model']['name']).name}, {description['kind']}",
        artifact=description,
        texts=_calibrated_on(description["provenance"]["recipe"]),
        file=file or Path(path).name,
        version=__version__,
        made_from=_made_from(description["provenance"]),
        rotated_into=basis_in_words(rotation["basis"], rotation.get("boundaries", ())) if rotation else None,
        compared_with=sorted({e["against"] for e in found.evaluations if e.get("against")}),
        measured=[table(found) for found in measured],
        speed=[table(found) for found in speed],
        scored=score_rows(description["score"]),
        programs=table(programs_table(description)),
    )


def _calibrated_on(recipe: Mapping[str, Any] | None) -> list[str]:
    """The texts that a recipe's manifest names, if it does."""
    named = ((recipe or {}).get("calibrate") or {}).get("text") or []
    return [named] if isinstance(named, str) else list(named)


def _made_from(provenance: Mapping[str, Any]) -> str | None:
    """The name of the model that all was made from, where other verbs made another of it, in their order."""
    for step in (ROTATION, DISTILLATION, PRUNING):
        if (made := provenance[step]) is not None:
            return str(made.get("teacher") or made["model"])
    return None


def _head(description: Mapping[str, Any]) -> dict[str, Any]:
    model = description["provenance"]["model"]
    tags = ["sparsepack", description["kind"], *(["activation-sparsity"] if description["sparse_sites"] else [])]
    tags += ["pruned"] if description["pruning"] else []
    tags += ["sparse-attention"] if description["attention"] else []
    if Path(description["path"]).suffix == ".gguf":
        tags.append("gguf")
    head: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": tags}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model["name"]) and not os.path.exists(model["name"]):
        head |= {"base_model": model["name"], "base_model_relation": "quantized"}
    return head
