"""Members of a group that go on from the state another one was in, without anyone waiting for anyone else.

When a source is asked for a turn that branches leave at, their slots fork its context and all of them sample that turn
at once. Meanwhile the source's worker is asked for its state, which goes to the branches' workers; what a slot
has sampled by then waits for its worker. A source that is over before that turn, or is past it when a branch gets its
slot (branches of another unit), has no such state any more: the branch's worker then plays the source's actions again
and its slot reads the source's tokens.

Which of the two it is, where a source was left, and so every token, follows from the plan, the source's tokens and
the number of slots and workers; never from timing. A fork that is refused or fails is no fork of another state: its
member runs from the reset, as others of its group do, so that the step has all its trajectories; it bears the reason
(`Trajectory.fork`). What it sampled meanwhile is dropped.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agentrl_jax.protocol import Observation
from agentrl_jax.rollout.attribution import judge_replay
from agentrl_jax.rollout.episode import Ask
from agentrl_jax.rollout.forks import reason_of, resumed
from agentrl_jax.rollout.live import Forking, LiveEpisode
from agentrl_jax.rollout.records import Branch, Fork
from agentrl_jax.rollout.wire import Answer, Captured, Failure, Replay, Reply, Resume

if TYPE_CHECKING:
    from agentrl_jax.rollout.collect import Driver


class Branches:
    """The branches among a driver's episodes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def wait(self, run: LiveEpisode, branch: Branch) -> None:
        """A branch has got its slot and worker: it starts when its source is there."""
        run.waiting, source = True, run.unit.kin[branch.member]
        if source.over or source.episode.turn >= branch.turn:
            self._follow(run, source)
        else:
            source.branches.append(run)

    def ask(self, run: LiveEpisode, ask: Ask) -> None:
        """Submit a turn, and that of the branches that leave here."""
        if not run.branches:
            return self._driver.ask(run, ask)
        leaving = [other for other in run.branches if other.plan.branch and other.plan.branch.turn == ask.turn]
        run.branches = [other for other in run.branches if other not in leaving]
        beside = [other for other in leaving if other.unit is run.unit]
        shares = len(run.unit.plans) <= self._driver.near  # then all of the unit are on one device
        if ask.fresh:  # a context begins here: it is read once, for whoever is on the device
            self._driver.ask(run, ask)
        for other in beside:
            whole = self._part(other, run, ask.turn, replayed=False)
            if not shares:
                self._driver.ask(other, whole)
            elif ask.fresh:
                self._driver.ask(other, ask, share_with=run.slot)
            else:
                self._driver.ask(other, ask, fork_from=run.slot)
        if not ask.fresh:
            self._driver.ask(run, ask)
        run.captures += beside
        self._driver.proceed(run)
        for other in leaving:
            if other not in beside:
                self._follow(other, run)

    def ended(self, source: LiveEpisode) -> None:
        """An episode is over: those that had not reached its state yet play its actions again."""
        captures, source.captures, source.capturing = source.captures, [], False
        for run in captures:
            if not run.over and run.forking is not None:
                run.forking.replayed = True
                self._replay(run)
        branches, source.branches = source.branches, []
        for run in branches:
            self._follow(run, source)

    def takes(self, run: LiveEpisode, reply: Reply) -> bool:
        """Whether a reply is one that no episode waits for; what is to come of it then has."""
        if run.capturing:
            self._captured(run, reply)
        elif run.forking is not None:
            asked = run.plan.branch is None or run not in run.unit.kin[run.plan.branch.member].captures
            if asked and not (isinstance(reply, Failure) and reply.phase == "idle"):
                self._forked(run, run.forking, reply)
        elif not (run.waiting or run.refused is not None):
            return False
        return True  # what is left is the death of a process that held no state of this run

    def _part(self, run: LiveEpisode, source: LiveEpisode, turn: int, *, replayed: bool) -> Ask:
        """The branch takes over its source's record up to a turn; gives the whole context as what to read."""
        run.episode, ask = source.episode.branched(run.plan, turn)
        run.waiting = False
        run.forking = Forking(begun=time.monotonic(), replayed=replayed, tokens=run.episode.length)
        return ask

    def _follow(self, run: LiveEpisode, source: LiveEpisode) -> None:
        """Branch from the record of a source that is past the turn, or over; its last turn is the last to branch at."""
        assert run.plan.branch is not None
        turn = min(run.plan.branch.turn, source.episode.turn)
        if turn < 1:
            run.waiting = False
            return self._driver.start_anew(run)
        self._driver.ask(run, self._part(run, source, turn, replayed=True))
        self._replay(run)

    def _replay(self, run: LiveEpisode) -> None:
        self._driver.pool.submit(run.worker, Replay(run.plan.task, run.plan.seed, run.episode.performed))

    def _captured(self, source: LiveEpisode, reply: Reply) -> None:
        captures, source.captures, source.capturing = source.captures, [], False
        seconds = reply.wall_ms / 1e3
        for run in captures:
            if run.over or run.forking is None:
                continue
            run.forking.seconds, seconds = seconds, 0.0  # taken once for all of them
            if isinstance(reply, Answer) and isinstance(reply.value, Captured):
                initial, state = reply.value.initial, reply.value.state
                run.forking.bytes, run.forking.hash = len(initial.data) + len(state.data), state.hash
                command = Resume(run.plan.task, run.episode.performed, initial, state)
                self._driver.pool.submit(run.worker, command)
            else:
                self._refuse(run, run.forking, f"the state could not be had: {reason_of(reply)}")
        if isinstance(reply, Failure):  # with it went the source's own state
            self._driver.heal(source, reply, possible=self._driver.pool.spec.fork != "none")
        else:
            self._driver.proceed(source)

    def _forked(self, run: LiveEpisode, forking: Forking, reply: Reply) -> None:
        forking.seconds += reply.wall_ms / 1e3
        if forking.replayed:
            failure = reply if isinstance(reply, Failure) else None
            found = reply.replayed if isinstance(reply, Failure) else reply.value
            observations = tuple(o for o in found if isinstance(o, Observation)) if isinstance(found, tuple) else ()
            evidence = judge_replay(run.episode.hashes, observations, failure, len(run.episode.performed) + 1)
            refused = "" if evidence.finding == "not_reproduced" else evidence.detail
        else:
            refused = "" if resumed(reply, forking.hash) else reason_of(reply)
        if refused:
            return self._refuse(run, forking, refused)
        run.episode.fork, run.forking = _record(forking), None
        self._driver.proceed(run)

    def _refuse(self, run: LiveEpisode, forking: Forking, reason: str) -> None:
        run.forking, fork = None, _record(forking, reason)
        if run.sampling:
            run.refused = fork
        else:
            self._driver.start_anew(run, fork)


def _record(forking: Forking, refused: str = "") -> Fork:
    waited = round(time.monotonic() - forking.begun, 6)
    return Fork(
        way=forking.way, tokens=0 if refused else forking.tokens, bytes=forking.bytes,
        seconds=round(forking.seconds, 6), waited_s=waited, refused=refused,
    )  # fmt: skip
