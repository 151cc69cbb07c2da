"""Bars inside a page: no script, colours from the page's style.

Upright ones are SVG with a value under the pointer. Lying ones are HTML, so that long labels take another line and
letters keep their size at every width of the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 130, 38, 18, 8


@dataclass(frozen=True)
class Bar:
    """A value with its label; `mark`, a line across it: what was aimed at; `spread`: the least and the greatest."""

    label: str
    value: float
    mark: float | None = None
    spread: tuple[float, float] | None = None


def columns(title: str, bars: Sequence[Bar], highest: float | None = None, form: str = "{:.3g}") -> Markup:
    """One upright bar each, for as many as there are blocks in a model.

    highest -- the value at the top (default: the largest); form -- how values are written
    """
    top = highest or max((max(bar.value, bar.mark or 0) for bar in bars), default=0) or 1.0
    plot = _HEIGHT - _TOP - _BOTTOM
    step = (_WIDTH - _LEFT) / max(len(bars), 1)
    wide = min(step * 0.8, 26)
    parts = [_axis(top * share, _TOP + plot * (1 - share), form) for share in (0, 0.5, 1)]
    every = -(-len(bars) * 22 // (_WIDTH - _LEFT)) or 1  # labels are at most 22 wide
    for n, bar in enumerate(bars):
        x, tall = _LEFT + step * n + (step - wide) / 2, plot * min(bar.value / top, 1)
        said = f"{bar.label}: {form.format(bar.value)}"
        if bar.mark is not None:
            said += f", target {form.format(bar.mark)}"
        parts.append(
            Markup(
                '<g><title>{}</title><rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
            ).format(said, x, _TOP + plot - tall, wide, tall)
        )
        if bar.mark is not None:
            y = _TOP + plot * (1 - min(bar.mark / top, 1))
            parts.append(
                Markup('<line class="mark" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    x - 1, x + wide + 1, y, y
                )
            )
        parts.append(Markup("</g>"))
        if n % every == 0:
            parts.append(_text(x + wide / 2, _HEIGHT - 4, bar.label, "middle"))
    return _svg(title, _WIDTH, _HEIGHT, parts)


def rows(title: str, bars: Sequence[Bar], form: str = "{:,.1f}") -> Markup:
    """One lying bar each with its label before and its value behind, for a few; its spread is a line across its end."""
    top = max((value for bar in bars for value in (bar.value, *(bar.spread or ()))), default=0) or 1.0
    parts = []
    for bar in bars:
        line, said = Markup(""), form.format(bar.value)
        if bar.spread is not None:
            low, high = bar.spread
            line = Markup('<i class="spread" style="left:{:.2f}%;width:{:.2f}%"></i>').format(
                100 * low / top, 100 * (high - low) / top
            )
            said += f" ({form.format(low)} to {form.format(high)})"
        parts.append(
            Markup(
                '<span>{}</span><span class="track"><i class="bar" style="width:{:.2f}%"></i>{}</span>'
                '<span class="n">{}</span>'
            ).format(bar.label, 100 * bar.value / top, line, said)
        )
    return Markup('<div class="bars" role="group" aria-label="{}">{}</div>').format(title, Markup("").join(parts))


def _svg(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">').format(title, width, height)
    return head + Markup("").join(parts) + Markup("</svg>")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _axis(value: float, y: float, form: str) -> Markup:
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(_LEFT, _WIDTH, y, y)
    return line + _text(_LEFT - 5, y + 4, form.format(value), "end")
