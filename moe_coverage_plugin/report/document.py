"""Self-contained HTML: styles, scripts and pictures inside one file, and no request to anywhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent / "templates"
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, scripts: list[str], **values: Any) -> str:
    """Fill in a template that extends ``document.html``.

    The page's policy lets the named scripts run and nothing else, and forbids every request. Values are escaped.

    Args:
        scripts: files beside the template, in order.
    """
    script = "\n".join((_FOLDER / name).read_text() for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _ENVIRONMENT.get_template(template).render(
        style=Markup((_FOLDER / "document.css").read_text()),
        script=Markup(script),
        script_digest=digest,
        **values,
    )
    # a lone surrogate, which JSON can smuggle in, has no place in a file
    return text.encode(errors="replace").decode()


def data_uri(png: bytes) -> str:
    """A PNG as an address that holds the picture itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
