"""Environments from elsewhere, run unchanged: real packages, and a real server on a socket."""

import contextlib
import json
import random
import string
import threading
from typing import ClassVar

import pytest
from agentrl_envs.adapters import common, gym, openenv, reasoning, textarena_games, verifiers_tasks
from agentrl_envs.replaying import ForkRefused

from agentrl_jax.protocol import Action, Snapshot, Status, StopReason, ToolCall


def act(**arguments):
    return ToolCall(name="act", arguments=arguments)


def texts(played):
    return [message.content for seen in played.observations for message in seen.content]


def check_replay(suite, task, calls):
    """A state restored elsewhere goes on as the one it was taken from."""
    one, two = suite.make(), suite.make()
    try:
        one.reset(task, 0)
        for call in calls[:-1]:
            one.step(Action(text="", calls=(call,)))
        kept = one.snapshot()
        two.restore(kept)
        assert two.snapshot() == kept
        last = Action(text="", calls=(calls[-1],))
        assert two.step(last).content == one.step(last).content
        assert two.snapshot() == one.snapshot() != kept
        history = json.loads(kept.data)
        history["observations"][-1] = "0" * 32
        with pytest.raises(ForkRefused):
            two.restore(Snapshot(data=json.dumps(history).encode(), hash=""))
    finally:
        one.close()
        two.close()


def test_a_gymnasium_environment(play):
    """The optimal way through the lake, by name and by number; rewards and info stay hidden."""
    pytest.importorskip("gymnasium", reason=gym.missing())
    options = {"environment": "FrozenLake-v1", "options": {"is_slippery": False}}
    suite = gym.suite(**options, actions=["left", "down", "right", "up"], instructions="Reach the goal.")
    task = suite.tasks("train", 1, 0)[0]
    way = [act(action=name) for name in ("down", "down", "right", "right", "down", "right")]
    played = play(suite, task, way)
    assert played.verdict.success and played.verdict.diagnostics["return"] == 1.0
    assert texts(played) == ["4", "8", "9", "10", "14", "15"] and "prob" not in str(played.observations)
    assert not play(suite, task, way[:-1]).verdict.success
    hole = play(suite, task, [act(action="right"), act(action="down"), act(action="down")])
    assert hole.observations[-1].terminated and hole.verdict.outcome is False
    check_replay(suite, task, way[:3])
    by_number = gym.suite(**options)
    assert play(by_number, task, [act(action=n) for n in (1, 1, 2, 2, 1, 2)]).verdict.success
    wrong = play(by_number, task, [act(action=4), act(action="down"), act()])
    assert all(seen.status is Status.INVALID_ACTION for seen in wrong.observations)


def test_a_gymnasium_environment_of_ones_own(play):
    """Text actions, a reward that is no number, an info dict with the secret, a time limit."""
    gymnasium = pytest.importorskip("gymnasium", reason=gym.missing())

    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(20)
        observation_space = gymnasium.spaces.Text(50, charset=string.printable)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.secret = str(self.np_random.integers(10**6))
            return "say something", {"secret": self.secret}

        def step(self, action):
            reward = "none" if action == "void" else float(action == self.secret)
            return f"heard {action}", reward, action in ("void", self.secret), False, {"secret": self.secret}

    gymnasium.register("AgentrlEcho-v0", entry_point=lambda: Echo(), max_episode_steps=3)
    suite = gym.suite("AgentrlEcho-v0", options={"disable_env_checker": True})
    task, other = suite.tasks("train", 2, 0)
    secret = str(gymnasium.make("AgentrlEcho-v0").reset(seed=task.data["seed"])[1]["secret"])
    played = play(suite, task, [act(action="a"), act(action=secret)])
    assert played.verdict.success and secret not in texts(play(suite, task, [act(action="a")]))
    assert not play(suite, other, [act(action=secret)]).verdict.success
    assert play(suite, task, [act(action="void")]).verdict.outcome is None
    late = play(suite, task, [act(action="a")] * 3)
    assert late.observations[-1].truncated and not late.observations[-1].terminated and late.verdict.outcome is False
    assert play(suite, task, [act(action="é")]).observations[0].status is Status.INVALID_ACTION
    with pytest.raises(ValueError, match="expected Discrete or Text"):
        gym.suite("Pendulum-v1")
    with pytest.raises(ValueError, match="must name each once"):
        gym.suite("FrozenLake-v1", actions=["left"])
    with pytest.raises(ValueError, match="gymnasium has no environment"):
        gym.suite("NoSuchThing-v0")


def test_reasoning_gym(play):
    pytest.importorskip("reasoning_gym", reason=reasoning.missing())
    suite = reasoning.suite("chain_sum", config={"max_terms": 3})
    found = {split: suite.tasks(split, 6, 1) for split in common.SPLITS}
    assert len({task.data["question"] for some in found.values() for task in some}) == 18
    task = found["heldout"][0]
    played = play(suite, task, suite.solve(task))
    assert played.verdict.success
    answer = suite.solve(task)[0].arguments["text"]
    assert answer not in json.dumps(dict(task.data)) or len(answer) < 3
    wrong = play(suite, task, [ToolCall(name="answer", arguments={"text": f"{answer} or 1"})])
    assert not wrong.verdict.success and wrong.verdict.outcome is not None
    assert not play(suite, task, []).verdict.success
    with pytest.raises(ValueError, match="evaluates answers as code"):
        reasoning.suite("countdown")
    with pytest.raises(ValueError, match="no_such_set"):
        reasoning.suite("no_such_set")


class GuessServer:
    """A number to guess, over the OpenEnv protocol: `GET /schema`, and a session per WebSocket at `/ws`."""

    SCHEMA: ClassVar = {
        "action": {
            "type": "object", "required": ["number"], "additionalProperties": False,
            "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
        },
        "observation": {}, "state": {},
    }  # fmt: skip

    def __init__(self):
        from websockets.http11 import Response
        from websockets.sync.server import serve

        def request(connection, asked):
            if asked.path != "/schema":
                return None
            body = json.dumps(self.SCHEMA).encode()
            return Response(200, "OK", type(asked.headers)([("Content-Length", str(len(body)))]), body)

        self.server = serve(self.session, "127.0.0.1", 0, process_request=request)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def session(self, socket):
        secret = None
        for message in socket:
            asked = json.loads(message)
            if asked["type"] == "close":
                return
            if asked["type"] == "reset":
                secret = random.Random(asked["data"]["seed"]).randint(1, 50)
                said, reward = "guess from 1 to 50", None
            elif asked["data"]["number"] == -1:
                return  # hangs up in the middle of the episode
            elif asked["data"]["number"] < -1:
                code = "VALIDATION_ERROR" if asked["data"]["number"] == -2 else "EXECUTION_ERROR"
                socket.send(json.dumps({"type": "error", "data": {"message": "no such number", "code": code}}))
                continue
            else:
                number = asked["data"]["number"]
                said = "right" if number == secret else "higher" if number < secret else "lower"
                reward = 1.0 if number == secret else None
            seen = {"said": said, "metadata": {"secret": secret}, "hint": secret}
            socket.send(json.dumps({
                "type": "observation", "data": {"observation": seen, "reward": reward, "done": said == "right"},
            }))  # fmt: skip

    def close(self):
        self.server.shutdown()
        self.thread.join()


def test_an_openenv_server(play):
    pytest.importorskip("websockets", reason=openenv.missing())
    with contextlib.closing(GuessServer()) as server:
        suite = openenv.suite(server.url, hidden=["hint"])
        assert list(suite.spec.tools[0].parameters["properties"]) == ["number"]
        task = suite.tasks("train", 1, 0)[0]
        secret = random.Random(task.data["seed"]).randint(1, 50)
        played = play(suite, task, [act(number=secret - 1), act(number=secret)])
        assert texts(played) == ['{"said": "higher"}', '{"said": "right"}']
        assert played.verdict.success and played.observations[-1].terminated
        assert play(suite, task, [act(number=99)]).verdict.outcome is False
        check_replay(suite, task, [act(number=99), act(number=secret)])
        policys = play(suite, task, [act(number=-2)]).observations[0]
        assert policys.status is Status.INVALID_ACTION and "no such number" in policys.content[0].content
        broken = play(suite, task, [act(number=-3)]).observations[0]
        assert broken.status is Status.ERROR and broken.env_status.retryable
        gone = play(suite, task, [act(number=-1)]).observations[0]
        assert gone.status is Status.ERROR and gone.env_status.service == "openenv"
    with pytest.raises(ConnectionError, match="start it, or correct the url"):
        openenv.suite(server.url, timeout_s=2)


def test_rewards_of_none_are_unscored_and_early_ends_are_not():
    def judged(rewards, ended, **options):
        state = {"actions": [], "measured": {"rewards": rewards, "ended": ended}}
        final, asked = Snapshot(data=json.dumps(state).encode(), hash=""), {"goal": 1.0, "stop": None, **options}
        return common.judge([], final, **asked).outcome

    assert judged([0.5, 0.5], True) is True and judged([0.5, 0.4], True) is False
    assert judged([0.5, None], True) is None and judged([None], False) is False and judged([2.0], False) is False
    assert judged([2.0], False, stop=StopReason.BUDGET) is False, "a limit is no way out"
    assert judged([0.5, 0.5], True, goal=None, most=4.0) == 0.25 and judged([-3.0], True, goal=None) == 0.0
    assert judged([None, 1.0], True, last_only=True) is True and judged([1.0, None], True, last_only=True) is None
    assert [common.reward_of(value) for value in (None, float("nan"), float("inf"), "1", True, 2)] == [
        None, None, None, None, 1.0, 2.0,
    ]  # fmt: skip


def test_a_verifiers_taskset(play, tmp_path, monkeypatch):
    pytest.importorskip("verifiers", reason=verifiers_tasks.missing())
    (tmp_path / "sums_of_a_test.py").write_text(
        "import verifiers.v1 as vf\n"
        "class Data(vf.TaskData):\n    answer: int\n"
        "class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):\n"
        "    @vf.reward\n    async def correct(self, task, trace) -> float:\n"
        "        if 'crash' in trace.last_reply: raise RuntimeError('the scorer broke')\n"
        "        return float(trace.last_reply == str(task.answer))\n"
        "class Sums(vf.Taskset[Sum, vf.TasksetConfig]):\n"
        "    def load(self):\n        for n in range(60): yield Sum(Data(prompt=f'{n} + {n}?', answer=2 * n))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    suite = verifiers_tasks.suite("sums_of_a_test:Sums")
    task = suite.tasks("train", 1, 0)[0]
    for said, outcome in ((str(2 * task.data["index"]), 1.0), ("x", 0.0), ("crash", None)):
        played = play(suite, task, [ToolCall(name="reply", arguments={"text": said})])
        assert played.verdict.outcome == outcome


def test_a_textarena_game(play):
    pytest.importorskip("textarena", reason=textarena_games.missing())
    suite = textarena_games.suite("FrozenLake-v0")
    moves = [ToolCall(name="move", arguments={"text": f"[{way}]"}) for way in ("right", "down", "right")]
    lakes = suite.tasks("train", 8, 0)  # in some of them the way is through a hole
    task = next(lake for lake in lakes if not play(suite, lake, moves[:2]).observations[-1].terminated)
    check_replay(suite, task, moves)
    assert not play(suite, task, moves[:1]).verdict.success
