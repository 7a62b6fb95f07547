"""Self-contained HTML pages: styles, scripts and pictures in one file that requests nothing."""

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

    The page's content security policy allows only the named scripts, and forbids every request. Values are escaped.

    Args:
        template: name of the template file.
        scripts: names of files in the folder of templates, in order.
        **values: variables of the template.

    Returns:
        The page.
    """
    script = "\n".join((_FOLDER / name).read_text() for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _ENVIRONMENT.get_template(template).render(
        style=Markup((_FOLDER / "document.css").read_text()),
        script=Markup(script),
        script_digest=digest,
        **values,
    )
    # JSON can contain lone surrogates, which UTF-8 cannot encode
    return text.encode(errors="replace").decode()


def data_uri(png: bytes) -> str:
    """Encode a PNG as a ``data:`` address."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
