"""The sensitivity table as a page that needs nothing else: a bar for each stage."""

from collections.abc import Sequence
from html import escape

from llmq.quantize.sensitivity import Candidate, Sensitivity

_STYLE = """
:root{color-scheme:light dark;--ink:#1d1f24;--soft:#5b606b;--page:#fbfaf7;--line:#ebe8e1;--bar:#0a6fb8}
@media(prefers-color-scheme:dark){:root{--ink:#e8e6e1;--soft:#a6abb6;--page:#14161a;--line:#2a2e36;--bar:#6db8f2}}
body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0}p,small{color:var(--soft)}ol{list-style:none;margin:0;padding:0}
li{display:grid;grid-template-columns:minmax(0,20rem) 1fr 6rem;gap:.1rem 1rem;align-items:center;padding:.5rem 0;border-top:1px solid var(--line)}
b,small{overflow-wrap:anywhere}svg{width:100%;height:.75rem}rect{fill:var(--bar)}
output{text-align:right;font-variant-numeric:tabular-nums}small{grid-column:1/-1}
@media(max-width:40rem){li{grid-template-columns:1fr auto}svg{grid-column:1/-1;grid-row:2}}
"""


def page(table: Sequence[Sensitivity]) -> str:
    """Draw the table, most sensitive stage first.

    Args:
        table: What the choices cost.

    Returns:
        HTML.
    """
    rows = sorted(table, key=lambda row: row.candidates[0].kl, reverse=True)
    most = max(row.candidates[0].kl for row in rows) or 1.0
    body = "\n".join(_item(row, row.candidates[0].kl / most) for row in rows)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Sensitivity</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
        "<h1>What quantizing one stage alone costs</h1>"
        "<p>Divergence of the predictions in nats a token: measured for the coarsest scheme, which the bar shows, "
        f"and estimated for the others.</p>\n<ol>\n{body}\n</ol></html>\n"
    )


def _item(row: Sensitivity, share: float) -> str:
    coarsest, *others = row.candidates
    told = ", ".join(f"{_label(candidate)} {candidate.kl:.2g}" for candidate in others)
    return (
        f"<li><b>{escape(row.name.removeprefix('model.'))}</b>"
        f'<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true"><rect width="{100 * share:.1f}" height="1"/></svg>'
        f"<output>{coarsest.kl:.5f}</output><small>{escape(_label(coarsest))}; {escape(told)}</small></li>"
    )


def _label(candidate: Candidate) -> str:
    return f"{candidate.scheme} g{candidate.group_size}" if candidate.group_size else candidate.scheme
