"""Commands of sparsepack as a test gives them, in this process."""

from click.testing import CliRunner, Result

from sparsepack.cli import main


def sparsepack(*arguments: object, given: str | bytes | None = None) -> Result:
    """Run a command; `given` is its standard input."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=given)


def succeeds(*arguments: object) -> str:
    """Run what must succeed; its standard output."""
    result = sparsepack(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: object, code: int = 2) -> str:
    """Run what must fail, without a traceback; the one line that it says."""
    result = sparsepack(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("sparsepack: ")]
    assert len(lines) == 1, result.output
    return lines[0]
