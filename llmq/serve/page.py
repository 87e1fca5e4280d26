"""The chat page: one document with its style and script inside, so that it needs nothing else."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import Response


def page(status: int) -> Response:
    """The chat page.

    Args:
        status: 401 for a browser without a key: the page asks for one.

    Returns:
        HTML under a policy that lets nothing run or load but the page's own parts.
    """
    body, policy = _assembled()
    headers = {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "cache-control": "no-store",
    }
    return Response(body, status, headers, "text/html; charset=utf-8")


@cache
def _assembled() -> tuple[str, str]:
    """The document, and its Content-Security-Policy."""
    static = files("llmq.serve") / "static"
    html, style, script = ((static / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return html.replace("{{style}}", style).replace("{{script}}", script), policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
