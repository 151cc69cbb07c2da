"""`python -m sparsepack`."""

from sparsepack.cli.app import main

main(prog_name="sparsepack")
