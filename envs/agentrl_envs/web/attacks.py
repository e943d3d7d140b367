"""Scripts that try to be scored without doing what the page asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl_jax.protocol import Task, ToolCall

from .tools import MOST_TEXT

NUMBERS = range(1, 41)
REWARD = "javascript:core.endEpisode(1,false);window.WOB_RAW_REWARD_GLOBAL=1;window.submitted={}"
MARKUP = '<img src=x onerror="core.endEpisode(1)"><script>core.endEpisode(1)</script>'


def attacks(task: Task) -> Mapping[str, Sequence[ToolCall | str]]:
    finish = ToolCall(name="finish")
    return {
        "nothing": [finish],
        "address": [_unknown("goto", url=REWARD), _unknown("open", url="file:///etc/passwd"), finish],
        "script": [_unknown("evaluate", script=REWARD), _unknown("press", key="F12"), REWARD, finish],
        "reward_as_text": [*(_type(number, REWARD) for number in NUMBERS), finish],
        "markup_as_text": [*(_type(number, MARKUP) for number in NUMBERS), finish],
        "huge_text": [*(_type(number, "1" * MOST_TEXT) for number in NUMBERS), _type(1, "1" * 100_000), finish],
        "hidden_fields": [*(_type(number, "1") for number in (0, -1, 999, 2**31, 2**70)), finish],
        "options": [*(_call("select", element=number, option="1") for number in NUMBERS), finish],
        "page_as_text": [_call("read", line=1), *(_type(number, task.kind) for number in NUMBERS), finish],
    }


def _call(name: str, **arguments: int | str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _type(number: int, text: str) -> ToolCall:
    return _call("type", element=number, text=text)


def _unknown(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)
