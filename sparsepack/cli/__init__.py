"""The command line: one thin click command per verb."""

from sparsepack.cli.main import main

__all__ = ["main"]
