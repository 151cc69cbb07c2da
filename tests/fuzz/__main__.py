"""`python -m tests.fuzz [TARGET ...]`: what `make fuzz` runs."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import fuzz
from tests.fuzz.targets import TARGETS, make_targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what the inputs are made from")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where inputs that failed stay")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for target in make_targets(Path(folder), asked.targets or TARGETS):
            only = {} if asked.case is None else {"first": asked.case, "most": 1}
            for failure in fuzz(target, asked.seed, asked.seconds, asked.keep.absolute(), **only):
                print(failure, flush=True)
                failures.append(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
