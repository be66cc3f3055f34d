"""Two HTML pages without scripts. `/` links to the routes that a browser can open. `/docs` lists
all routes with their fields, from the OpenAPI description that `/openapi.json` returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from twostroke import __version__
from twostroke.serve.http.routing import Route

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff }
code, h2 { font-family: ui-monospace, monospace } h2 { font-size: 1rem; margin: 2rem 0 0 }
table { border-collapse: collapse; margin: .5rem 0 } td { padding: .1rem 1rem .1rem 0;
       vertical-align: top; font-size: .9rem } .type { color: #57606a } a { color: #0550ae }
@media (prefers-color-scheme: dark) { body { color: #e6e8eb; background: #16191d }
       .type { color: #9aa4b0 } a { color: #79b8ff } }
"""


def index_page(routes: Sequence[Route], model: str, root_path: str) -> bytes:
    """Return the page `/`. `root_path`: the prefix that a proxy adds to all paths."""
    listed = [r for r in routes if r.method == "GET" and r.path != "/" and "{" not in r.path]
    items = "".join(
        f'<li><a href="{escape(root_path + r.path)}"><code>{escape(r.path)}</code></a> '
        f"{escape(r.summary)}</li>"
        for r in listed
    )
    body = f"<p>This server runs <code>{escape(model)}</code>. Pages:</p><ul>{items}</ul>"
    return _page("twostroke", body)


def docs_page(description: dict[str, Any]) -> bytes:
    """Return the page `/docs` for an OpenAPI description."""
    sections = []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            fields = "".join(_rows(operation, description["components"]["schemas"]))
            table = f"<table>{fields}</table>" if fields else ""
            title = f"{method.upper()} {escape(path)}"
            sections.append(f"<h2>{title}</h2><p>{escape(operation['summary'])}</p>{table}")
    return _page("twostroke: routes", "".join(sections))


def _rows(operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """Yield a table row for each field of an operation's request body."""
    body = operation.get("requestBody")
    if body is None:
        return
    schema = _resolved(body["content"]["application/json"]["schema"], schemas)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else ""
        field_type = escape(_type(field, schemas))
        yield f"<tr><td><code>{escape(name)}</code><td class=type>{field_type}<td>{note}</tr>"


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a "$ref" names, or the schema itself if it has no "$ref"."""
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: dict[str, Any] = schemas[name] if name else schema
    return resolved


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a short description of a field's type. The type null is left out."""
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(_type(option, schemas) for option in options)
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"] if value is not None)
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    json_type = schema.get("type", "any")
    if json_type == "array" and (items := schema.get("items")):
        return f"list of {_type(items, schemas)}"
    return str(json_type)


def _page(title: str, body: str) -> bytes:
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{body}"
        f"<p class=type>twostroke {__version__}</p></html>"
    ).encode()
