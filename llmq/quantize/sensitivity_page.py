"""The sensitivity table as a page that needs nothing else: a bar for each stage."""

from collections.abc import Sequence
from html import escape

from llmq.quantize.sensitivity import Sensitivity

_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse}"
    "td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #eee}td:first-child,th:first-child{text-align:left}"
    ".bar{display:inline-block;height:10px;background:#4678b4}"
)


def page(table: Sequence[Sensitivity]) -> str:
    """Draw the table, most sensitive stage first.

    Args:
        table: What the choices cost.

    Returns:
        HTML.
    """
    rows = sorted(table, key=lambda row: row.candidates[0].kl, reverse=True)
    most = max(row.candidates[0].kl for row in rows) or 1.0
    body = "".join(
        f"<tr><td>{escape(row.name)}</td><td>{escape(_label(row, 0))}</td><td>{row.candidates[0].kl:.5f}</td>"
        f'<td style="text-align:left"><span class="bar" style="width:{300 * row.candidates[0].kl / most:.1f}px"></span></td>'
        f"<td>{escape(', '.join(f'{_label(row, i)} {c.kl:.5f}' for i, c in enumerate(row.candidates) if i))}</td></tr>"
        for row in rows
    )
    head = "<tr><th>linears</th><th>coarsest</th><th>KL, nats a token</th><th></th><th>estimated for others</th></tr>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Sensitivity</title><style>{_STYLE}</style>'
        f"<h1>What quantizing one stage alone costs</h1><table>{head}{body}</table></html>\n"
    )


def _label(row: Sensitivity, index: int) -> str:
    candidate = row.candidates[index]
    return f"{candidate.scheme} g{candidate.group_size}" if candidate.group_size else candidate.scheme
