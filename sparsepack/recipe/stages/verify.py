"""`verify: true`: the artifact against itself and against the model."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from sparsepack.files.atomic import write_json
from sparsepack.progress import say
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stage import Job, Stage, Verdict, leaves, read_json
from sparsepack.recipe.stages.pack import PACK, Pack, artifact_of

REPORT = "verify.json"


def _problems(recipe: Recipe, section: bool) -> Iterator[str]:
    if Pack.find_in(recipe) is None:
        yield "verify: there is no artifact to verify; add a pack section"


def _run(job: Job, section: bool) -> None:
    from sparsepack.formats.verify import verify

    artifact = artifact_of(job)
    report = verify(artifact, job.checkpoint).to_json()
    for problem in report["problems"]:
        say(f"verify: {problem}")
    # Without the work folder's path: it may be moved, and two runs of one recipe leave the same bytes.
    report["problems"] = [problem.replace(str(artifact), artifact.name) for problem in report["problems"]]
    del report["path"]
    write_json(job.folder / REPORT, report)


def _unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    if gates.verify and not recipe.section("verify"):
        yield "gates.verify: the artifact is not verified; expected verify: true"


def _judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    """A verification that failed fails the run whether or not a gate asks for it."""
    if report["verify"] is not None:
        problems = len(report["verify"]["problems"])
        yield Verdict("verify", problems, "no problem", "the file", not problems)


VERIFY = Stage(
    name="verify",
    key="verify",
    type=Annotated[bool, Field(description="Check every byte of the artifact, and its weights against the model.")],
    default=False,
    needs=(PACK.name,),
    outputs=leaves(REPORT),
    settings=lambda job, section: {},
    run=_run,
    problems=_problems,
    result=("verify", read_json(REPORT), None),
    gates={"verify": (Annotated[bool, Field(description="The artifact must have been verified.")], False)},
    unmeasured=_unmeasured,
    judge=_judge,
)
