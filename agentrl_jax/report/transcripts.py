"""Episodes as a person reads them: who said each token, how likely it was, and what credit it got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from agentrl_jax.report.charts import NOTHING, show
from agentrl_jax.report.markup import tag
from agentrl_jax.report.read import Row, number

# The numbers of batch.Source, which a report does not import: it reads files.
SOURCES = {1: "system", 2: "user", 3: "policy", 4: "environment", 5: "teacher"}
_CHOSEN = (3, 5)
_LONG = 60  # tokens of system text that are folded away
_EXPLAIN = {
    "system": "the rules and the tools, given",
    "user": "the task, given",
    "policy": "sampled by the policy: what training may change",
    "environment": "the environment's answers, given",
    "teacher": "written by a demonstration",
}


def choose(rows: Sequence[Row], count: int = 10) -> list[Row]:
    """At most `count` transcripts that differ: the earliest first, then the latest of each ending and kind in turn."""
    if len(rows) <= count:
        return list(rows)
    piles: dict[tuple[Any, ...], list[int]] = {}
    for index in range(len(rows) - 1, 0, -1):
        row = rows[index]
        piles.setdefault((bool(row.get("success")), bool(row.get("violated")), row.get("kind")), []).append(index)
    picked = [0]
    while len(picked) < count:
        for pile in piles.values():
            if pile and len(picked) < count:
                picked.append(pile.pop(0))
    return [rows[i] for i in sorted(picked)]


def legend(rows: Sequence[Row]) -> str:
    present = {int(token[1]) for row in rows for token in row.get("tokens", ())}
    keys = "".join(
        f'<span class="key src{n}" title="{_EXPLAIN[name]}">{name}</span>'
        for n, name in SOURCES.items()
        if n in present
    )
    return (
        f'<div class="legend">{keys}<span class="swatch"><i class="worse"></i><i class="worse half"></i><i></i>'
        '<i class="better half"></i><i class="better"></i></span><span>advantage: worse … better than its group</span>'
        '<span class="tok sure" style="--u:.9">underlined</span><span>the policy was unsure here</span></div>'
    )


def transcript(row: Row, *, scale: float, opened: bool) -> str:
    """One episode as a foldable card. `scale` is the advantage that gets the full shade."""
    tokens = row.get("tokens") or ()
    success, violated = bool(row.get("success")), bool(row.get("violated"))
    word, tone = ("violated a rule", "bad") if violated else ("solved", "good") if success else ("failed", "bad")
    if number(row, "reward") is None:
        word, tone = "unscored", "mute"
    cause = f" · {escape(str(row['cause']))}" if row.get("cause") else ""
    facts = (
        ("reward", show(number(row, "reward"))),
        ("advantage", _signed(number(row, "advantage"))),
        ("stop", escape(str(row.get("stop", NOTHING)).replace("_", " ")) + cause),
        ("tokens", str(len(tokens))),
    )
    cells = "".join(f"<span><small>{name}</small> {value}</span>" for name, value in facts)
    step = number(row, "step")
    when = escape(str(row.get("stage", ""))) + (f" {step:g}" if step is not None else "")
    title = escape(str(row.get("kind") or row.get("task") or "episode").replace("_", " "))
    head = (
        tag("span", word, css=f"badge {tone}"),
        tag("strong", title),
        tag("span", escape(str(row.get("task", ""))), css="soft mono"),
        tag("span", f"{when} · member {escape(str(row.get('member', 0)))}", css="soft"),
        tag("span", css="fill"),
        cells,
    )
    verbatim = any(str(t[0])[:1] in (" ", "Ġ", "▁") for t in tokens)
    talk = tag("div", *(_passage(run, scale, verbatim) for run in _passages(tokens)), css="talk")
    opening = '<details class="episode" open>' if opened else '<details class="episode">'
    return f"{opening}{tag('summary', *head)}{talk}</details>"


def shade_scale(rows: Sequence[Row]) -> float:
    """The largest |advantage| on any token shown."""
    found = [abs(float(t[4])) for row in rows for t in row.get("tokens", ()) if len(t) > 4 and t[4] is not None]
    return max(found, default=0.0) or 1.0


def _passages(tokens: Sequence[Any]) -> list[list[Any]]:
    """Runs of tokens that one party said in one go."""
    return [list(run) for _, run in groupby(tokens, key=lambda t: (int(t[1]), int(t[2])))]


def _passage(tokens: list[Any], scale: float, verbatim: bool) -> str:
    source = int(tokens[0][1])
    name = SOURCES.get(source, f"source {source}")
    if source in _CHOSEN:
        spans = [_token(t, scale, verbatim, name) for t in tokens]
        text = "".join(spans) if verbatim else " ".join(spans)
        label = f"{name}<small>turn {int(tokens[0][2]) + 1}</small>"
    else:
        words = [_text(t[0]) for t in tokens]
        text = escape("".join(words) if verbatim else " ".join(words))
        label = name
        if len(tokens) > _LONG and source == 1:
            text = f"<details><summary>{len(tokens)} tokens</summary>{text}</details>"
    return f'<div class="passage src{source}"><div class="who">{label}</div><div class="text">{text}</div></div>'


def _token(token: Any, scale: float, verbatim: bool, source: str) -> str:
    text, logprob, advantage = str(token[0]), token[3], token[4]
    styles, classes, facts = [], ["tok"], [f"turn {int(token[2]) + 1}"]
    if isinstance(logprob, int | float) and source == "policy":
        probability = math.exp(min(0.0, float(logprob)))
        facts.insert(0, f"p = {probability:.3f} (log {float(logprob):.2f})")
        if probability < 0.8:
            classes.append("sure")
            styles.append(f"--u:{1 - probability:.2f}")
    if isinstance(advantage, int | float):
        facts.append(f"advantage {_signed(float(advantage))}")
        if advantage:
            classes.append("better" if advantage > 0 else "worse")
            styles.append(f"--a:{min(1.0, abs(float(advantage)) / scale):.2f}")
    style = f' style="{";".join(styles)}"' if styles else ""
    shown = escape(_text(text)).replace("\n", "↵\n") or "∅"
    return f'<span class="{" ".join(classes)}"{style} data-t="{escape(" · ".join(facts))}">{shown}</span>'


def _text(text: Any) -> str:
    """Byte-level tokenizers mark a space and a line break by stand-ins of their own."""
    return str(text).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}" if value else "0"
