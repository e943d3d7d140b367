"""Chat templates as Hugging Face writes them (jinja), and the functions that such templates expect. No transformers.

A template is code from elsewhere: it runs in jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes, sandbox
from jinja2.ext import Extension, loopcontrols

# A template that prints today's date would render the same conversation in two ways: a resumed run would not repeat,
# and a turn after midnight would not continue the one before. So its clock stands still.
CLOCK = datetime.datetime(2024, 7, 26)
Template = Callable[[Mapping[str, Any]], str]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for trainers that need it. Here: nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: datetime.datetime = CLOCK) -> Template:
    """A function from the template's variables to its text.

    Raises `ValueError` with the line where `source` is no jinja; the function raises it where the template does, with
    the template's own words.
    """
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = now.strftime
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"the chat template refuses: {error}") from None

    return render


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form in which chat templates read tools."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
