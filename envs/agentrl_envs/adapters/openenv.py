"""OpenEnv servers, over the WebSocket that such a server keeps per session.

    suite("http://localhost:8000")

The protocol: `{"type": "reset", "data": {"seed": 1}}` and `{"type": "step", "data": {...action...}}` are answered by
`{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}` or by an error. `GET /schema`
tells what an action is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Json,
    Message,
    Observation,
    Status,
    Suite,
    Task,
    ToolCall,
)  # fmt: skip

from ..answering import Reply, answer, shown, tool
from ..replaying import ReplayingEnvironment
from . import common

VERSION = "1"
HIDDEN = ("reward", "done", "metadata")  # of an observation: what is not for the policy
THE_POLICYS = ("VALIDATION_ERROR",)  # error codes that an action causes


def missing() -> str | None:
    if importlib.util.find_spec("websockets") is None:
        return "websockets is not installed: pip install 'agentrl-jax[adapters]'"
    return None


def suite(
    url: str,
    instructions: str = "",
    goal: float | None = 1.0,
    most: float = 1.0,
    steps: int = 32,
    fork: Literal["replay", "none"] = "replay",
    hidden: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> Suite:
    """The environment behind `url` as a suite; the server must be running.

    The outcome is whether the return reaches `goal`; `goal=None` makes it return / `most`; rewards that the server
    leaves None count as none while others come, and an episode with no other is unscored. `fork="none"` for a server
    that does not give the same episode for the same seed. `hidden` names fields of its observations that the policy
    must not see. Raises ConnectionError where no server answers.
    """
    schema = _action_schema(url, timeout_s)
    act = tool("act", "Take one action.", schema["properties"], optional=schema["optional"])
    spec = EnvironmentSpec(
        name="openenv",
        version=VERSION,
        tools=(act,),
        budget=Budget(steps=steps, tool_calls=steps, write_actions=steps, finishing=("act",)),
        fork=fork,
        side_effects="isolated",
    )
    concealed = (*HIDDEN, *hidden)
    return Suite(
        spec=spec,
        make=partial(OpenEnvEnvironment, spec, url, instructions, concealed, timeout_s),
        tasks=partial(common.seeded_tasks, "openenv"),
        verify=partial(common.verify, goal, most),
        verifier_version=common.JUDGE_VERSION,
    )


def _action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """The action's fields, without the server's own `metadata`; references inside the schema are filled in."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=timeout_s) as reply:
            schema = json.loads(reply.read())["action"]
    except (OSError, urllib.error.URLError, ValueError, KeyError) as error:
        raise ConnectionError(f"no OpenEnv server answers at {url} ({error}); start it, or correct the url") from error
    filled = _filled(schema, schema.get("$defs", {}))
    properties = {key: value for key, value in filled.get("properties", {}).items() if key != "metadata"}
    return {"properties": properties, "optional": [key for key in properties if key not in filled.get("required", ())]}


def _filled(schema: Any, known: Mapping[str, Any], depth: int = 8) -> Any:
    if isinstance(schema, Mapping):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and depth:
            return _filled(known.get(name, {}), known, depth - 1)
        return {key: _filled(value, known, depth) for key, value in schema.items() if key != "$defs"}
    return [_filled(item, known, depth) for item in schema] if isinstance(schema, list) else schema


class ServiceDown(Exception):
    """The server cannot be reached, or broke."""


class OpenEnvEnvironment(ReplayingEnvironment):
    """One session of the server: a connection of its own."""

    def __init__(
        self, spec: EnvironmentSpec, url: str, instructions: str, concealed: tuple[str, ...], timeout_s: float
    ) -> None:
        self.spec = spec
        self._url, self._instructions, self._concealed, self._timeout_s = url, instructions, concealed, timeout_s
        self._open_session = contextlib.ExitStack()
        self._socket: Any = None
        self._rewards: list[float | None] = []
        self._ended = False

    def begin(self, task: Task, seed: int) -> Observation:
        from websockets.sync.client import connect

        self._rewards, self._ended = [], False
        base = self._url.rstrip("/").replace("http", "ws", 1)
        self._socket = self._open_session.enter_context(
            connect(f"{base}/ws", open_timeout=self._timeout_s, close_timeout=1.0, proxy=None)
        )
        data = self._ask({"type": "reset", "data": {"seed": int(task.data["seed"])}})
        if data["type"] != "observation":
            raise ServiceDown(f"the server cannot reset: {_message(data)}")
        text = f"{self._instructions}\n{self._show(data['data'])}".strip()
        return Observation(content=(Message(role="user", content=shown(text)),))

    def act(self, action: Action) -> Observation:
        return answer(action, self.spec.tools, self._take, lambda: self._ended)

    def _take(self, call: ToolCall) -> Reply:
        try:
            reply = self._ask({"type": "step", "data": dict(call.arguments)})
        except ServiceDown as error:
            return Reply(f"error: {error}", Status.ERROR, service="openenv")
        if reply["type"] != "observation":
            if reply.get("data", {}).get("code") in THE_POLICYS:
                return Reply(f"error: {_message(reply)}", Status.INVALID_ACTION)
            return Reply("error: the server failed", Status.ERROR, service="openenv")
        data = reply["data"]
        self._rewards.append(common.reward_of(data.get("reward")))
        self._ended = bool(data.get("done"))
        return Reply(self._show(data), terminated=self._ended)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps(message))
            reply = json.loads(self._socket.recv(timeout=self._timeout_s))
        except (WebSocketException, OSError, ValueError) as error:
            raise ServiceDown(f"the server at {self._url} does not answer ({type(error).__name__})") from error
        if not isinstance(reply, dict) or "type" not in reply:
            raise ServiceDown(f"the server at {self._url} does not speak the OpenEnv protocol")
        return reply

    def _show(self, data: Mapping[str, Any]) -> str:
        observed = data.get("observation") or {}
        return common.say({key: value for key, value in observed.items() if key not in self._concealed})

    def measured(self) -> Json:
        """Servers may leave the rewards on the way None; the whole episode is unscored only if all are."""
        known: list[float | None] = [reward for reward in self._rewards if reward is not None]
        return {"rewards": known or self._rewards[-1:], "ended": self._ended}

    def end(self) -> None:
        self._socket = None
        self._open_session.close()


def _message(reply: Mapping[str, Any]) -> str:
    return str(reply.get("data", {}).get("message", "no reason given"))[:300]
