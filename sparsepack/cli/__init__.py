"""The command line: thin click commands."""

from sparsepack.cli.app import main

__all__ = ["main"]
