"""The comparison as one HTML page: verdict, first difference, near ties, and the drift by position as pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Final

from polytoken.errors import UsageError
from polytoken.oracle.compare.rows import Drift, Tie, number
from polytoken.oracle.compare.verdict import Comparison

_MOST_POINTS: Final = 2000
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}"
    "table{border-collapse:collapse}td,th{border-bottom:1px solid #ccc;padding:.2rem .8rem;text-align:left}"
    ".identical{color:#176d2c}.same{color:#7a5b00}.different{color:#a3161b}svg{max-width:100%;height:auto}"
)


def html_report(comparison: Comparison, *, names: tuple[str, str]) -> str:
    """A page that needs nothing else.

    Raises:
        UsageError: matplotlib is not installed.
    """
    title = f"{names[0]} against {names[1]}"
    rows = {
        "left": f"{names[0]} ({comparison.engines[0]})",
        "right": f"{names[1]} ({comparison.engines[1]})",
        "first difference of a bit": str(comparison.exact or "none"),
        "first difference of meaning": str(comparison.semantic or "none"),
        "records compared": f"{comparison.compared}, {comparison.skipped} behind a choice that went another way",
        "tolerance of a logit": f"{comparison.tolerance.absolute:g} + {comparison.tolerance.relative:g} of its size",
        "notes": "; ".join(comparison.notes) or "none",
    }
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p class='{comparison.verdict.split()[0]}'><b>{escape(comparison.explain())}</b></p>"
        f"<table>{table}</table><h2>Choices that went another way</h2>{_tie_table(comparison.ties)}"
        f"<h2>Drift by position</h2>{plot_drift(comparison.drifts)}</html>\n"
    )


def _tie_table(ties: Sequence[Tie]) -> str:
    """Where ids differ, how far each side's own id is above the other's in its row, and at which rank that stands."""
    if not ties:
        return "<p>none</p>"
    head = ("where", "token", "left id", "right id", "left margin", "right margin", "left rank", "right rank", "why")
    rows = [
        (
            *(tie.where, tie.position, tie.left, tie.right, number(tie.left_margin), number(tie.right_margin)),
            *(tie.left_rank or "unlisted", tie.right_rank or "unlisted", tie.why),
        )
        for tie in ties
    ]
    titles = "".join(f"<th>{name}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return (
        f"<table><tr>{titles}</tr>{lines}</table><p>A margin is how far a side's own id is above the other side's in "
        "its own row; a rank is where the other's id stands there.</p>"
    )


def plot_drift(drifts: Sequence[Drift]) -> str:
    """Largest difference of a logit at every position, beside the gap between the best two ids, as inline SVG.

    Where the drift reaches the gap, the choice may go another way.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if not drifts:
        return "<p>no rows of logits in both</p>"
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            "--html needs matplotlib: pip install 'polytoken[oracle]'", code="missing_extra", field="--html"
        ) from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    drifts = _thinned(drifts)
    places = range(len(drifts))
    least = min((drift.largest for drift in drifts if drift.largest > 0), default=1e-7) / 2
    axes.semilogy(
        places,
        [max(drift.largest, least) for drift in drifts],
        ".-",
        color="#b3261e",
        label="largest drift (none: at the bottom)",
    )
    axes.semilogy(
        places, [max(drift.margin, least) for drift in drifts], ".", color="#7a8aa0", label="gap of the best two"
    )
    axes.set_xlabel("row, in the order of the receipt; a line where another record of several rows begins")
    axes.set_ylabel("logits")
    for place in _starts(drifts):
        axes.axvline(place, color="#ddd", linewidth=0.8, zorder=0)
    axes.legend(loc="best", frameon=False)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _thinned(drifts: Sequence[Drift]) -> Sequence[Drift]:
    """Of neighbouring rows the one that drifts most, where there are more than can be told apart."""
    share = -(-len(drifts) // _MOST_POINTS)
    if share <= 1:
        return drifts
    groups = (drifts[i : i + share] for i in range(0, len(drifts), share))
    return [max(group, key=lambda drift: drift.largest) for group in groups]


def _starts(drifts: Sequence[Drift]) -> list[int]:
    """Where another record begins."""
    return [i for i in range(1, len(drifts)) if drifts[i].position == 0 and drifts[i - 1].position > 0]
