"""Run a benchmark: `python -m benchmarks NAME [options]`; without NAME, list them."""

import ast
import importlib
import os
import sys
from pathlib import Path

import click

FOLDER = Path(__file__).parent


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def summary(name: str) -> str:
    """Return the first paragraph of a benchmark's docstring, without importing it."""
    doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names, or list all."""
    names = benchmark_names()
    if not arguments or arguments[0] in ("-h", "--help"):
        click.echo(f"{__doc__}\n")
        for name in names:
            click.echo(click.wrap_text(f"{name:20} {summary(name)}", 100, "", " " * 21))
        return
    name, *options = arguments
    if name not in names:
        click.echo(f"{name}: no such benchmark, expected one of {', '.join(names)}", err=True)
        sys.exit(2)
    # Before torch and llama.cpp: threads that wait passively, kind to neighbours, cost llama.cpp a quarter of its
    # decoding speed at two threads.
    os.environ.pop("OMP_WAIT_POLICY", None)
    importlib.import_module(f"benchmarks.{name}").main(options, prog_name=f"python -m benchmarks {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
