"""The text of a model's chat template: which one, and what messages call it. No Jinja here."""

from __future__ import annotations

from collections.abc import Mapping


def template_name(of_request: bool) -> str:
    return "the request's chat template" if of_request else "the model's chat template"


def choose_template(named: Mapping[str, str]) -> str | None:
    """Of a model's named templates the 'default' one, else the first by name."""
    if not named:
        return None
    return named["default"] if "default" in named else named[min(named)]
