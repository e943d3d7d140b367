"""Web pages in a real headless Chromium: find, click, type and select by number, then the page says how it went.

`source="forms"` (the default) makes small forms of our own; `source="miniwob"` opens the pages of MiniWoB++. Both need
Chromium and the extra `web`; `missing()` says what this machine lacks. `suite(...)` is the whole interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite

from . import attacks, browser, miniwob, solve, tasks, tools, verifier
from .env import WebEnvironment
from .options import SOURCES, Options

__all__ = ["SOURCES", "missing", "suite"]
VERSION = "1"
missing = browser.missing


def suite(source: str = "forms", kinds: Sequence[str] | None = None, max_calls: int = 24) -> Suite:
    """The web suite. `source`: "forms" or "miniwob". `kinds`: which pages, all of the source's by default; those that
    no solver is trained on make up `heldout`. Unknown values raise ValueError and name the known ones.

    Pages cannot reach the network or a file, open a window, or see a clock that moves by itself.
    """
    options = Options(source=source, kinds=None if kinds is None else tuple(kinds), max_calls=max_calls)
    spec = EnvironmentSpec(
        name="web",
        version=VERSION if source == "forms" else f"{VERSION}+miniwob-{miniwob.version()}",
        tools=tools.describe(),
        budget=Budget(steps=max_calls, tool_calls=max_calls, write_actions=0, retries=6, finishing=("finish",)),
        fork="replay",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=lambda: WebEnvironment(spec),
        tasks=partial(tasks.tasks, options),
        verify=verifier.verify,
        verifier_version=verifier.VERSION,
        solve=solve.solve,
        attacks=attacks.attacks,
        chance=0.0 if source == "forms" else 0.2,  # a page of two buttons is often solved by any click
        hidden=("goal",),
    )
