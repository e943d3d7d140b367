"""One page in a context of its own: opened from a text, acted on by number, read as a list of elements.

Only that text is ever served. Every other request, popup and download is refused and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .browser import Browser, BrowserError, browser

T = TypeVar("T")

ADDRESS = "http://page.invalid/"
POLICY = (  # beside the routes: what a page may load or do at all
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'none'; base-uri 'none'"
)
SETTLE_MS = 3_000  # of the page's own clock after every action: animations and delays end
VIEWPORT = {"width": 800, "height": 600}


@cache
def _world() -> str:
    return (Path(__file__).parent / "world.js").read_text(encoding="utf-8")


class Page:
    """A page at work. Methods raise BrowserError when the browser broke."""

    def __init__(self) -> None:
        self.refused = 0
        self.query = ""
        self.view: dict[str, Any] = {"elements": [], "ended": False, "reward": None, "submitted": None}
        self._browser: Browser | None = None
        self._context: Any = None
        self._page: Any = None
        self._served = False

    def open(self, html: str, seed: int) -> None:
        """Serves `html` once and starts it, with chance from `seed`. A browser that died unnoticed is replaced."""

        def start(chromium: Any) -> None:
            context, page = chosen.take(_blank, chromium)
            context.add_init_script(_world().replace("(SEED)", f"({seed})"))
            self._context, self._page = context, page  # it answers: whatever fails from now on is not its being dead
            context.route("**/*", lambda route: self._answer(route, html))
            context.on("page", self._refuse_popup)
            page.goto(ADDRESS, wait_until="load")
            self.view = page.evaluate(f"__world.begin({SETTLE_MS})")
            self.query = self.view.pop("query")

        self._browser = chosen = browser()
        try:
            chosen.do(start)
        except BrowserError:
            if self._context is not None:
                raise
            self._browser = chosen = browser()
            chosen.do(start)

    def _answer(self, route: Any, html: str) -> None:
        if route.request.url == ADDRESS and route.request.is_navigation_request() and not self._served:
            self._served = True
            headers = {"Content-Security-Policy": POLICY}
            route.fulfill(body=html, content_type="text/html; charset=utf-8", headers=headers)
        elif route.request.is_navigation_request():
            self.refused += 1
            route.fulfill(status=204)  # a navigation without content leaves the page where it is
        else:
            self.refused += 1
            route.abort()

    def _refuse_popup(self, page: Any) -> None:
        self.refused += 1
        page.close()

    def act(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Carries out click, type or select and lets the page settle; None, or what is wrong in a few words."""

        def perform() -> str | None:
            error = _ACTS[name](self._page, arguments)
            self.view = self._page.evaluate(f"__world.view({SETTLE_MS})")
            return error

        return self._do(perform)

    def digest(self) -> str:
        """The hash of the document, of its controls' values, of its clock and of its chance."""
        text = self._do(lambda: self._page.evaluate("__world.digest()"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        """Ends the context. Nothing to do where the browser is gone."""
        chosen, self._browser = self._browser, None
        if chosen is not None:
            with contextlib.suppress(BrowserError):
                chosen.do(lambda _: self._context.close() if self._context is not None else None)

    def _do(self, function: Callable[[], T]) -> T:
        if self._browser is None:
            raise BrowserError("the page is closed")
        return self._browser.do(lambda _: function())


def _blank(chromium: Any) -> tuple[Any, Any]:
    """A context that nobody has used, and an empty page in it: half of what opening a page takes."""
    context = chromium.new_context(
        viewport=VIEWPORT, locale="en-US", timezone_id="UTC", accept_downloads=False, service_workers="block"
    )
    return context, context.new_page()


def _click(page: Any, arguments: Mapping[str, Any]) -> str | None:
    spot = page.evaluate("n => __world.aim(n)", arguments["element"])
    if "error" in spot:
        return spot["error"]
    page.mouse.click(spot["x"], spot["y"])
    return None


def _type(page: Any, arguments: Mapping[str, Any]) -> str | None:
    """A click into the element, then the text in place of what it held: what a person does."""
    if error := _click(page, arguments):
        return error
    error = page.evaluate("a => __world.write(a[0], a[1])", [arguments["element"], arguments["text"]])
    if error == "":
        if arguments["text"]:
            page.keyboard.insert_text(arguments["text"])
        else:
            page.keyboard.press("Delete")
        return None
    return error


def _select(page: Any, arguments: Mapping[str, Any]) -> str | None:
    return page.evaluate("a => __world.choose(a[0], a[1])", [arguments["element"], arguments["option"]])


_ACTS = {"click": _click, "type": _type, "select": _select}
