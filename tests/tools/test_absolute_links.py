"""On PyPI the README's links lead to the repository."""

from pathlib import Path

from absolute_links import README, absolute

SOURCE = "https://github.com/someone/sparsepack"


def test_links_and_pictures_lead_to_that_version_in_the_repository() -> None:
    page = "[a](docs/a.md#b), ![p](p.png), [c](#here), [d](https://example.org/d)"
    assert absolute(page, SOURCE, "v1.2.0") == (
        f"[a]({SOURCE}/blob/v1.2.0/docs/a.md#b), ![p]({SOURCE}/raw/v1.2.0/p.png), [c](#here), [d](https://example.org/d)"
    )


def test_the_readme_keeps_no_relative_link() -> None:
    page = absolute(Path(README).read_text(encoding="utf-8"), SOURCE, "v1.2.0")
    assert f"[benchmarks/RESULTS.md]({SOURCE}/blob/v1.2.0/benchmarks/RESULTS.md)" in page
    assert "](docs/" not in page
    assert "](benchmarks/" not in page
