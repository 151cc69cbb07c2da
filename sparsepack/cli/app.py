"""The command line: its commands, made of what operations declare or each in `commands/`.

Nothing heavy is imported here, so that `--help` answers at once.
"""

import logging
import os

import click

from sparsepack.bench.options import BENCH
from sparsepack.calibrate.collect import CALIBRATE
from sparsepack.calibrate.distil import DISTIL
from sparsepack.calibrate.prune import PRUNE
from sparsepack.calibrate.rotate import ROTATE
from sparsepack.calibrate.thresholds import THRESHOLDS
from sparsepack.calibrate.trace import TRACE
from sparsepack.cli.commands.generate import generate
from sparsepack.cli.commands.inspect import inspect, verify
from sparsepack.cli.commands.place import place
from sparsepack.cli.commands.publish import card, push, report
from sparsepack.cli.commands.quickstart import quickstart
from sparsepack.cli.commands.run import run
from sparsepack.cli.commands.serve import serve
from sparsepack.cli.commands.simulate import simulate
from sparsepack.cli.commands.tune import tune
from sparsepack.cli.messages import Commands, add_quiet, add_signs_of_life, concerns_the_user, quiet_option
from sparsepack.cli.operations import command_of
from sparsepack.errors import UserError
from sparsepack.eval.options import EVAL
from sparsepack.integration.transformers.registration import OF_COMMANDS, register
from sparsepack.packing import PACK
from sparsepack.version import __version__

# Waiting OpenMP workers that spin make two threads slower than one when another process takes a core; torch reads this
# when it is first imported, so it stands before any command.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
logging.getLogger("transformers.modeling_rope_utils").addFilter(concerns_the_user)
register(OF_COMMANDS)


def _version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Say which version this is and which of its CPU kernels run here, and end."""
    if not asked or context.resilient_parsing:
        return
    from sparsepack.runtime.cpu.machine import instruction_set

    try:
        kernels = instruction_set()
    except UserError as error:
        kernels = f"none; {error}"
    click.echo(f"sparsepack, version {__version__}\nkernels: {kernels}")
    context.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version, and the instruction set of the CPU kernels or why there are none, and exit.",
)
@quiet_option
def main() -> None:
    """Find where a language model is sparse, pack it so that hardware profits, prove it is still the same model.

    MODEL is a Hugging Face folder or hub id, a GGUF, shipped:tiny, or shipped:tiny-mixture. TEXT is
    a .txt, .jsonl, .json, .csv or .tsv file (also .xz, .gz), a .parquet file, a folder of such files, one of these with
    :FIELD, shipped:train, shipped:heldout, or a data set NAME[:CONFIG[:SPLIT[:FIELD]]].

    Exit status: 0 done, 1 the run or a check failed, 2 a mistake in what was asked, 3 a gate failed, 130 interrupted.

    To complete verbs and options by the Tab key, add to ~/.bashrc: eval "$(_SPARSEPACK_COMPLETE=bash_source
    sparsepack)". In zsh and fish it is zsh_source and fish_source.
    """


calibrate, thresholds, rotate, prune, distil = map(command_of, (CALIBRATE, THRESHOLDS, ROTATE, PRUNE, DISTIL))
pack, evaluate, bench, trace = map(command_of, (PACK, EVAL, BENCH, TRACE))
main.add_commands("Begin", quickstart)
main.add_commands("Make", calibrate, thresholds, rotate, prune, distil, pack, run)
main.add_commands("Check", inspect, verify, evaluate, bench)
main.add_commands("Run", generate, serve, tune)
main.add_commands("Study", trace, simulate, place)
main.add_commands("Publish", report, card, push)
for each in main.commands.values():
    add_quiet(each)
for each in (calibrate, thresholds, rotate, prune, distil, pack, verify, evaluate, bench, tune, trace, simulate, run):
    add_signs_of_life(each)
add_signs_of_life(quickstart)
