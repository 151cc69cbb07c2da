"""`python -m tests.clients PYTHON NODE_FOLDER`: what `make clients` runs. Serves the tiny model, sends it the requests
of all rows, and writes what came back into docs/clients.md. Exit status 1 where a row failed.

PYTHON      -- of the environment with the clients of requirements.txt
NODE_FOLDER -- with node's packages, of package.json
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
KEY = "secret"
INTRODUCTION = """# Clients
`make clients` sends these requests to a server of the shipped tiny model, and writes this page. Each answer is checked
in form and content; the last column says what came back. The server has an API key and a chat template with tools.

"""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the tiny model in a process of its own; gives the URL."""
    command = [sys.executable, "-m", "sparsepack"]
    model = folder / "tiny.gguf"
    if not model.exists():
        subprocess.run([*command, "pack", "shipped:tiny", "-o", model], check=True)
    options = ("--port", "0", "--chat-template", HERE / "template.jinja")
    with (folder / "server.log").open("w") as log:
        environment = {**os.environ, "SPARSEPACK_API_KEY": KEY}
        server = subprocess.Popen(
            [*command, "serve", model, *map(str, options)], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            assert server.stderr is not None
            for line in server.stderr:
                log.write(line)
                if found := re.search(r"at (http://\S+)/v1;", line):
                    break
            else:
                raise RuntimeError(f"the server did not start; {log.name} says why")
            logging = subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)
            yield found[1]
            server.terminate()
            server.wait(30)
            logging.wait(30)
        finally:
            server.kill()


def results(*command: object) -> list[dict[str, Any]]:
    """Run a program that prints a JSON line for each row."""
    lines = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    python, node = sys.argv[1], Path(sys.argv[2])
    for path in (HERE / "node").glob("*.mjs"):
        shutil.copy(path, node)  # node looks for packages in the folder of a module
    with serving(node.parent) as url:
        rows = [*results(python, HERE / "rows.py", url, KEY), *results("node", node / "rows.mjs", url, KEY)]
    rows.sort(key=lambda row: row["client"])  # stable: of one client in the order of its module
    failed = [row for row in rows if not row["passed"]]
    for row in failed:
        print(f"{row['client']}: {row['request']}: {row['result']}", file=sys.stderr)
    cells = [(row["client"], row["request"], row["result"] if row["passed"] else "failed") for row in rows]
    table = [("client", "request", "what came back"), ("---",) * 3, *cells]
    PAGE.write_text(INTRODUCTION + "".join(f"| {' | '.join(map(cell, one))} |\n" for one in table))
    print(f"{len(rows)} rows, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
