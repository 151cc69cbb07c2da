"""`python -m sparsepack.cli`."""

from sparsepack.cli.app import main

main()
