"""The command line: one thin click command per verb."""

from sparsepack.cli.app import main

__all__ = ["main"]
