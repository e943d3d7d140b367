"""HTML elements as strings. Children are markup already; text from a run is escaped where it enters (`text`)."""

from __future__ import annotations

from html import escape


def tag(name: str, *children: str, css: str = "", **attributes: object) -> str:
    """`<name class=css ...>children</name>`. Attribute values are escaped; an underscore in a name stands for `-`."""
    pairs = {"class": css, **{key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}}
    words = "".join(f' {key}="{escape(str(value), quote=True)}"' for key, value in pairs.items() if value != "")
    return f"<{name}{words}>{''.join(children)}</{name}>"


def text(value: object) -> str:
    """Escaped, with the underscores of an identifier read as spaces."""
    return escape(str(value).replace("_", " "))


def empty(message: str) -> str:
    return tag("p", escape(message), css="empty")
