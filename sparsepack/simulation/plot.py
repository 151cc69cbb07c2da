"""A simulation as a picture: what has a slot, and what is read from host memory, for every policy and share."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError, requires_extra
from sparsepack.files.atomic import atomic_file, check_output
from sparsepack.placement.options import DRAWN
from sparsepack.placement.options import POLICIES as NAMES
from sparsepack.placement.policies import POLICIES

FORMATS = (".png", ".svg")
_STYLE = {"svg.hashsalt": "sparsepack"}  # the same result gives the same bytes
_COLUMNS = 4  # of the legend
_PANELS = {
    "hit_rate": "share of what is needed that has a slot",
    "host_reads": "neurons read from host memory per token",
}


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before there is anything to draw.

    Raises `OutputError` for a name that does not end as FORMATS do or cannot be written, `UserError` where matplotlib
    is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise OutputError(f"{path}: no kind of picture that is drawn here; expected a name that ends in .png or .svg")
    check_output(path, overwrite=True)
    with requires_extra("plot", "--plot"):
        import matplotlib  # noqa: F401


def drawn(played: Collection[str]) -> list[str]:
    """The four policies, of those that were played, that a picture shows where nobody asked for others."""
    return [name for name in DRAWN if name in played][:4]


def plot(result: Mapping[str, Any], path: Path, policies: Collection[str] | None = None) -> None:
    """Draw what `simulate` returned into a PNG or SVG file, which is replaced if it exists.

    policies -- those to draw, of the ones that were played (default: all)

    Error bars are standard errors over sessions; policies that know the future have broken lines. Raises what
    `check_plot` does.
    """
    names = [name for name in result["policies"] if policies is None or name in policies]
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels = figure.subplots(1, len(_PANELS))
    for panel, (field, label) in zip(panels, _PANELS.items(), strict=True):
        for policy in names:
            rows = sorted((row for row in result["results"] if row["policy"] == policy), key=lambda row: row["cached"])
            panel.errorbar(
                [100 * row["cached"] for row in rows],
                [row[field]["value"] for row in rows],
                [row[field]["stderr"] or 0 for row in rows],  # a single session has none
                label=policy,
                color=matplotlib.colormaps["tab20"](NAMES.index(policy)),  # the same in every picture
                linestyle="--" if POLICIES[policy].clairvoyant else "-",
                marker="o",
                markersize=3.5,
                capsize=2,
            )
        panel.set_ylabel(label)
        panel.set_xlabel("share of the neurons that have slots, %")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=_COLUMNS, frameon=False, fontsize=11
    )
    form = path.suffix.lower().removeprefix(".")
    with atomic_file(path, overwrite=True) as temporary, matplotlib.rc_context(_STYLE):
        figure.savefig(temporary, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
