"""MiniWoB++: the pages of the installed package `miniwob`, each made into one text that needs no other file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from functools import cache
from pathlib import Path

# Each has a reference solution in `goals.py`, found from the page's text alone.
KINDS = (
    "click-button", "click-checkboxes", "click-checkboxes-large", "click-collapsible-2", "click-dialog-2",
    "click-link", "click-option", "click-tab", "choose-list", "enter-date", "enter-password", "enter-text",
    "enter-text-dynamic", "find-word", "login-user", "navigate-tree", "read-table", "simple-arithmetic",
)  # fmt: skip
UNSEEN = (
    "click-checkboxes-transfer", "click-tab-2", "enter-text-2", "enter-time", "form-sequence-2", "login-user-popup",
    "read-table-2", "simple-algebra",
)  # fmt: skip
_SCRIPT = re.compile(r'<script[^>]*\bsrc="([^"]+)"[^>]*>\s*</script>')
_STYLE = re.compile(r'<link[^>]*\bhref="([^"]+\.css)"[^>]*>')


class PageMissing(RuntimeError):
    """The package `miniwob` is not here, or lacks a page; the message names what to do."""


def version() -> str:
    try:
        return importlib.metadata.version("miniwob")
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@cache
def page(kind: str) -> str:
    """The page of this kind with its scripts and style sheets in place. The package is located, not imported."""
    found = importlib.util.find_spec("miniwob")
    if found is None or found.origin is None:
        raise PageMissing("the package miniwob is not installed: pip install -e '.[web]'")
    root = Path(found.origin).parent / "html"
    folder = root / "miniwob"

    def read(name: str) -> str:
        path = (folder / name).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            raise PageMissing(f"miniwob {version()}: {kind} needs {name}, which is not in the package")
        return path.read_text(encoding="utf-8", errors="replace")

    def script(match: re.Match[str]) -> str:
        return "<script>" + read(match[1]).replace("</script", "<\\/script") + "</script>"

    text = _STYLE.sub(lambda match: f"<style>{read(match[1])}</style>", read(f"{kind}.html"))
    return _SCRIPT.sub(script, text)
