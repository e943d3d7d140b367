"""The pool over a Ray cluster: one actor a node, which runs a local pool there, with the same worker processes.

Deadlines, crash isolation and reaping are the local pool's; a node that is lost costs what its workers were at, as a
crash does, and its place is taken on another node.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections import deque
from typing import Any, Self

from agentrl_jax import __version__
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, EnvironmentSpec, Verdict
from agentrl_jax.rollout.play import MAX_OBSERVATION_CHARS
from agentrl_jax.rollout.pool import FIRST_PHASE, Deadlines, Pool
from agentrl_jax.rollout.wire import Answer, Command, Failure, Phase, Reply

SCHEME = "ray://"
INSTALL = "pip install -e '.[ray]'"
_TICK_S = 0.05  # how late a deadline may be noticed on a node


class Node:
    """The actor: a local pool, whose replies are awaited."""

    def __init__(
        self, ref: EnvironmentRef, workers: int, deadlines: Deadlines, max_chars: int, label: str | None
    ) -> None:
        self.pool = Pool(ref, workers, deadlines, max_observation_chars=max_chars, label=label)
        self._awaited: dict[int, asyncio.Future[Reply]] = {}
        self._tender: asyncio.Task[None] | None = None

    async def introduce(self) -> tuple[EnvironmentSpec, str, str]:
        """Raises `UserError` where the environment cannot be built here."""
        return self.pool.spec, self.pool.verifier_version, __version__

    async def perform(self, worker: int, command: Command) -> Reply:
        loop = asyncio.get_running_loop()
        future = self._awaited[worker] = loop.create_future()
        self.pool.submit(worker, command)
        if self._tender is None or self._tender.done():
            self._tender = loop.create_task(self._tend())
        return await future

    async def release(self, worker: int) -> None:
        """Give up what a worker is at."""
        self.pool.give_up(worker)
        if (future := self._awaited.pop(worker, None)) is not None and not future.done():
            future.cancel()

    async def close(self) -> None:
        self.pool.close()

    async def _tend(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.pool.fileno(), ready.set)
        try:
            while self._awaited:
                for worker, reply in self.pool.poll(0.0):
                    if (future := self._awaited.pop(worker, None)) is not None and not future.done():
                        future.set_result(reply)
                ready.clear()
                try:
                    await asyncio.wait_for(ready.wait(), _TICK_S)
                except TimeoutError:  # deadlines are looked at
                    continue
        finally:
            loop.remove_reader(self.pool.fileno())


class RayPool:
    """`Pool`'s interface over the cluster at `url`: `ray://HOST:PORT`, or `ray://auto` for the one that this machine is
    part of. Workers are spread evenly over the nodes that have CPUs to offer.

    Raises `UserError` where Ray is not installed, there is no cluster, or a node runs another version of this package.
    """

    def __init__(
        self,
        url: str,
        ref: EnvironmentRef,
        workers: int,
        deadlines: Deadlines | None = None,
        *,
        max_observation_chars: int = MAX_OBSERVATION_CHARS,
        label: str | None = None,
    ) -> None:
        self._ray = _connected(url)
        self.ref, self.workers, self.deadlines = ref, workers, deadlines or Deadlines()
        self._max_chars, self._label = max_observation_chars, label
        hosts = self._alive()
        if not hosts:
            raise UserError(f"{url}: no node of the cluster has CPUs to offer")
        self._hosts = hosts[:workers]
        self._nodes = [self._start(node, host) for node, host in enumerate(self._hosts)]
        self._down: set[str] = set()  # hosts that have lost an actor
        self._free = deque(range(workers))
        self._held: set[int] = set()
        self._flying: dict[Any, tuple[int, Any]] = {}  # by the reference of a reply: its worker, and the actor asked
        self._phases: dict[int, Phase] = {}
        self._introduction: tuple[EnvironmentSpec, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spec(self) -> EnvironmentSpec:
        return self._introduced()[0]

    @property
    def verifier_version(self) -> str:
        return self._introduced()[1]

    @property
    def expects(self) -> bool:
        return bool(self._flying)

    def phase(self, worker: int) -> Phase:
        """What a worker was last asked for; how far it has come its node knows."""
        return self._phases.get(worker, "idle")

    def busy(self, worker: int) -> bool:
        """Whether a command of this worker is in flight."""
        return worker in self._asked()

    def acquire(self) -> int | None:
        if not self._free:
            return None
        self._held.add(worker := self._free.popleft())
        return worker

    def release(self, worker: int) -> None:
        flying = [ref for ref, (owner, _) in self._flying.items() if owner == worker]
        for ref in flying:
            del self._flying[ref]
            node, place = self._place(worker)
            self._nodes[node].release.remote(place)
        self._phases.pop(worker, None)
        self._held.discard(worker)
        self._free.appendleft(worker)

    def submit(self, worker: int, command: Command) -> None:
        if self.busy(worker):
            raise RuntimeError(f"worker {worker} already has a command")
        node, place = self._place(worker)
        self._phases[worker] = FIRST_PHASE.get(type(command), "reset")
        actor = self._nodes[node]
        self._flying[actor.perform.remote(place, command)] = worker, actor

    def poll(self, timeout: float | None) -> list[tuple[int, Reply]]:
        if not self._flying:
            return []
        waited, rest = self._ray.wait(list(self._flying), num_returns=1, timeout=timeout)
        more = self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
        told = [(*self._flying.pop(ref), self._get(ref)) for ref in (*waited, *more)]
        dead = {actor: reply for _, actor, reply in told if isinstance(reply, str)}
        replies: list[tuple[int, Reply]] = []
        for worker, actor, reply in told:
            phase = self._phases.pop(worker, "idle")
            if actor in dead and not (isinstance(reply, Answer) and isinstance(reply.value, Verdict)):
                reply = Failure(kind="crash", phase=phase, message=dead[actor])  # what it answered is lost state too
            replies.append((worker, reply))
        answered = {worker for worker, _ in replies}
        return [*replies, *(lost for actor, why in dead.items() for lost in self._replace(actor, why, answered))]

    def close(self) -> None:
        """End every node's pool and leave the cluster. Can be called twice."""
        nodes, self._nodes = self._nodes, []
        if nodes:
            self._ray.wait([node.close.remote() for node in nodes], num_returns=len(nodes), timeout=10)
            for node in nodes:
                self._ray.kill(node)
            self._ray.shutdown()

    def _revive(self, node: int) -> None:
        """Start an actor where one answers; the cluster is slow to learn which nodes are gone."""
        self._down.add(self._hosts[node])
        for host in [*(set(self._alive()) - self._down), *self._down]:
            self._hosts[node], self._nodes[node] = host, self._start(node, host)
            try:
                self._ray.get(self._nodes[node].introduce.remote(), timeout=self.deadlines.start)
            except self._ray.exceptions.RayError:
                self._down.add(host)
            else:
                return
        raise UserError("no node of the Ray cluster is left that starts environment workers; mend it, then --resume")

    def _alive(self) -> list[str]:
        """Ids of the nodes that have CPUs to offer."""
        return [n["NodeID"] for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]

    def _asked(self) -> set[int]:
        return {worker for worker, _ in self._flying.values()}

    def _get(self, ref: Any) -> Any:
        """The reply; text where the actor or its node is gone."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            return f"the node is lost: {' '.join(str(error).split())[:300]}"

    def _replace(self, actor: Any, why: str, answered: set[int]) -> list[tuple[int, Reply]]:
        """Start another in the place of a lost actor. Failures of the workers whose state is lost with it, and of whom
        nothing else tells: they have just answered, or are still asked."""
        if actor not in self._nodes:  # replaced when the first of its workers told
            return []
        node = self._nodes.index(actor)
        self._revive(node)
        idle = sorted(self._held - self._asked() - answered)
        lost = [worker for worker in idle if self._place(worker)[0] == node]
        return [(worker, Failure(kind="crash", phase="idle", message=why)) for worker in lost]

    def _place(self, worker: int) -> tuple[int, int]:
        """(node, worker there)."""
        return worker % len(self._hosts), worker // len(self._hosts)

    def _start(self, node: int, host: str) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        count = len(range(node, self.workers, len(self._hosts)))
        variables = {name: value for name, value in os.environ.items() if name.startswith("AGENTRL_")}
        where = strategies.NodeAffinitySchedulingStrategy(host, soft=False)
        actor = self._ray.remote(
            num_cpus=0, scheduling_strategy=where, runtime_env={"env_vars": variables}, max_concurrency=count + 2
        )(Node)
        return actor.remote(self.ref, count, self.deadlines, self._max_chars, self._label)

    def _introduced(self) -> tuple[EnvironmentSpec, str]:
        if self._introduction is None:
            try:
                found = self._ray.get([node.introduce.remote() for node in self._nodes])
            except self._ray.exceptions.RayTaskError as error:
                raise UserError(f"no environment worker starts on the cluster: {error.cause}") from error
            others = sorted({version for _, _, version in found} - {__version__})
            if others:
                raise UserError(f"the cluster's nodes run agentrl-jax {', '.join(others)}, this machine {__version__}")
            self._introduction = found[0][0], found[0][1]
        return self._introduction


def _connected(url: str) -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise UserError(f"{url}: Ray is not installed: {INSTALL}") from error
    address = "auto" if url == f"{SCHEME}auto" else url
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # it has one for every way of not being there
        raise UserError(f"{url}: no Ray cluster answers ({' '.join(str(error).split())[:200]})") from error
    return ray
