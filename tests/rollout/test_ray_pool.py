"""Episodes over a real Ray cluster of two nodes on this machine: what they give is what local workers give."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import fake_suites
import pytest
import scripted

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Cause, EnvironmentRef, StopReason, Task, ToolCall
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.ray_pool import RayPool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.replay import replay

DEADLINES = Deadlines(start=60.0, reset=10.0, step=2.0, verify=10.0)
ADD2, ADD3 = ToolCall(name="add", arguments={"n": 2}), ToolCall(name="add", arguments={"n": 3})
GOOD = [ADD2, ADD3, ToolCall(name="finish")]
HAVE_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE_RAY, reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of its processes and sockets


def break_(how: str) -> list:
    return [ADD2, ToolCall(name="break", arguments={"how": how}), ADD3, GOOD[-1]]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes; the second may be lost by a test, which then adds another."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        made.add_node(num_cpus=2)
        made.wait_for_nodes()
        before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), made.address
        yield made
        made.shutdown()
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


@pytest.fixture
def ref(tmp_path) -> EnvironmentRef:
    return EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})


def run(pool, renderer, scripts: dict, on_turn=lambda request: None) -> dict[int, Trajectory]:
    def script(request):
        on_turn(request)
        return scripts[request.key[1]][request.key[2]]

    task = Task(id="t", split="train", data={"goal": 5})
    plan = [EpisodePlan(group=0, member=m, task=task, seed=9, key=(0, m)) for m in scripts]
    sampler = scripted.ScriptedSampler(renderer, script, slots=len(scripts))
    return {t.member: t for t in collect(plan, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0)}


@needs_ray
@pytest.mark.slow
def test_it_gives_what_local_workers_give_and_leaves_no_process(cluster, ref, renderer):
    scripts = {0: GOOD, 1: break_("raise"), 2: break_("hang"), 3: break_("once_crash"), 4: [ADD2, "hello"], 5: GOOD}
    with RayPool("ray://auto", ref, 6, DEADLINES, label="ray-test") as pool:
        assert pool.spec.name == "counter" and pool.verifier_version == "2"
        hosts = set(pool._hosts)
        far = run(pool, renderer, scripts)
    assert len(hosts) == 2, "both nodes have workers"
    marks = list(Path(ref.options["scratch"]).iterdir())  # type: ignore[arg-type]
    for mark in marks:
        mark.unlink()
    with Pool(ref, 6, DEADLINES) as pool:
        near = run(pool, renderer, scripts)
    fields = ("tokens", "sources", "action_mask", "turn_ids", "stop", "verdict")
    for member, t in near.items():
        assert [getattr(t, f) for f in fields] == [getattr(far[member], f) for f in fields]
        causes = [None if x.attribution is None else x.attribution.cause for x in (t, far[member])]
        assert causes[0] is causes[1] and far[member].receipt.breach() is None
    assert far[1].attribution.cause is Cause.ENVIRONMENT and "the database is locked" in far[1].attribution.evidence
    assert far[2].stop is StopReason.TIMEOUT and far[2].attribution.cause is Cause.POLICY
    assert far[3].success and far[3].receipt.healed == 1
    assert replay(far[0].receipt) is None, "a receipt from the cluster replays on this machine"
    assert not _marked("ray-test")


@needs_ray
@pytest.mark.slow
def test_a_lost_node_costs_no_episode(cluster, ref, renderer):
    lost = []
    with RayPool("ray://auto", ref, 4, DEADLINES, label="ray-lost") as pool:
        node = next(iter(cluster.worker_nodes))
        place = pool._hosts.index(node.node_id)
        pid = pool._ray.get(pool._nodes[place].__ray_call__.remote(lambda _: os.getpid()))

        def lose(request):
            """Before the second turn: the machine is gone, with whatever ran there."""
            if request.key[2] == 1 and not lost:
                lost.append(pid)
                os.kill(pid, signal.SIGKILL)
                cluster.remove_node(node, allow_graceful=False)

        done = run(pool, renderer, dict.fromkeys(range(4), GOOD), on_turn=lose)
    assert lost and all(t.success for t in done.values()), {m: (t.attribution, t.stop) for m, t in done.items()}
    assert sum(t.receipt.healed for t in done.values()) >= 1
    cluster.add_node(num_cpus=2)
    assert not _marked("ray-lost")


@needs_ray
@pytest.mark.slow
def test_an_environment_that_cannot_be_built_there_says_so(cluster):
    broken = EnvironmentRef(target="fake_suites:broken")
    with (
        RayPool("ray://auto", broken, 2, DEADLINES) as pool,
        pytest.raises(UserError, match="the index file is missing"),
    ):
        _ = pool.spec


def test_without_ray_or_a_cluster_it_says_what_to_do(ref, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray://auto: Ray is not installed: pip install -e '\.\[ray\]'"):
        RayPool("ray://auto", ref, 2)


def _marked(label: str, patience_s: float = 5.0) -> list[str]:
    """Processes of the label that live on after a while."""
    limit = time.monotonic() + patience_s
    while True:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"AGENTRL_RUN_LABEL={label}".encode() in environ.read_bytes().split(b"\0"):
                    found.append(environ.parent.name)
            except OSError:
                continue
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


assert fake_suites.TOOLS  # the module that the workers import by name is the one beside this test
