"""A whole run: open what the stages share, run them in order, evaluate between them, write summary and report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax

from agentrl_jax import __version__
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.models.lora import trained, with_trained
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes import evaluate as evaluation
from agentrl_jax.recipes import meshes
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check, check_environment, check_offload
from agentrl_jax.recipes.config import RunConfig, stage_name
from agentrl_jax.recipes.demonstrations import open_stores
from agentrl_jax.recipes.directory import Source, claimed, discard, prepare, require_space
from agentrl_jax.recipes.external import open_sampler
from agentrl_jax.recipes.keeping import open_store
from agentrl_jax.recipes.run import Run
from agentrl_jax.recipes.shares import HOSTS, check_hosts, check_rows, home, left_of, stored_of
from agentrl_jax.recipes.waiting import buffer_of, stop
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import Driver
from agentrl_jax.rollout.collector import Collector
from agentrl_jax.rollout.grammar import call_grammar
from agentrl_jax.rollout.orphans import run_label
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.ray_pool import RayPool
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.clock import Clock
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.external import ExternalSampler
from agentrl_jax.runtime.fleet import spread
from agentrl_jax.runtime.grammars import Grammars
from agentrl_jax.runtime.hosts import Hosts
from agentrl_jax.runtime.interrupts import Interrupted, Interrupts
from agentrl_jax.runtime.progress import Progress
from agentrl_jax.runtime.sinks import RunSinks, write_json


def train(
    config: RunConfig, directory: Path, *, resume: bool = False, quiet: bool = False, source: Source | None = None,
    hosts: Hosts | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run every stage of a config; returns the summary that is also written to `summary.json`.

    `source` is where the config came from, kept with the run for `evaluate_run`. With `resume` it goes on from the
    newest checkpoint in `directory`, to the same parameters bit for bit. `hosts` (from `runtime.hosts.join`): the
    processes that call this at the same time; all of them see `directory`.

    Raises `UserError` for anything the user can put right, before anything is written.
    """
    hosts = hosts or Hosts()
    hosts.timeout_s, hosts.lost_s = config.hosts.timeout_s, config.hosts.lost_s
    suite, policy = resolve(config)
    meshes.check_mesh(config, policy.model)
    check_hosts(config, hosts)
    if not resume:  # a run that goes on may have learned from them already
        open_stores(config, policy)
    require_space(directory, config.rollout.free_space_gb)
    if hosts.leads:
        prepare(config, directory, resume=resume, source=source)
    with ExitStack() as stack:
        if hosts.leads:
            stack.enter_context(claimed(directory))
        hosts.exchange(None)
        _require_sight(directory, hosts)
        interrupts = stack.enter_context(Interrupts())
        try:
            summary = _run_stages(
                config, suite, policy, directory, stack, interrupts, hosts=hosts, resume=resume, quiet=quiet
            )
        except BaseException as error:
            begun = (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").stat().st_size
            if isinstance(error, UserError) and hosts.leads and not begun:
                discard(directory)  # it never came to a step: the name is free again
            if not (isinstance(error, Interrupted) and hosts.stopped):
                hosts.failed(error)  # before anything is closed that may wait for the others
            raise
    if hosts.leads:
        from agentrl_jax.report.html import build

        build(directory)
    return summary


def _require_sight(directory: Path, hosts: Hosts) -> None:
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: process {hosts.index} of {hosts.count} does not see what process 0 has written there; give "
            "a place that all hosts share with runs=DIR"
        )
    home(directory, hosts).mkdir(parents=True, exist_ok=True)


def _run_stages(
    config: RunConfig,
    suite: Suite,
    policy: policies.Policy,
    directory: Path,
    stack: ExitStack,
    interrupts: Interrupts,
    *,
    hosts: Hosts,
    resume: bool,
    quiet: bool,
) -> dict[str, Any]:
    run = open_run(config, suite, policy, directory, stack, interrupts, hosts=hosts, resume=resume, quiet=quiet)
    stack.enter_context(jax.transfer_guard("disallow"))
    try:
        _go_through_stages(run)
    except Interrupted:
        hosts.agree_to_stop()
        stop(run)
        run.checkpoints.wait()
        raise
    run.checkpoints.wait()
    summary = summarize(run) if hosts.leads else None
    if hosts.leads:
        write_json(run.directory / "summary.json", summary)
    return hosts.first(summary)


def _go_through_stages(run: Run) -> None:
    config = run.config
    if run.restored is None:  # also where the evaluation is there already: versions are numbered as without a stop
        run.publish()
    if not _has_evaluation(run, "before"):
        _evaluate_around(run, "before")
    for index, stage in enumerate(config.stages):
        name = stage_name(stage)
        if run.restored is not None and _index(config, run.restored["stage"]) > index:
            continue
        run.stage, run.stage_done = name, False
        run.step = int(run.restored["step"]) if run.restored is not None and run.restored["stage"] == name else 0
        stage(run)
        if not _has_evaluation(run, name, final=True):
            _evaluate_around(run, name)


def resolve(config: RunConfig) -> tuple[Suite, policies.Policy]:
    """The environment and the policy of a config, checked against each other; nothing is written and nothing starts."""
    check(config)
    suite = config.environment.load()
    check_environment(config, suite)
    check_offload(config)
    try:
        return suite, policies.describe(config, suite)
    except ValueError as error:
        raise UserError(f"policy: {error}") from error


def open_run(
    config: RunConfig,
    suite: Suite,
    policy: policies.Policy,
    directory: Path,
    stack: ExitStack,
    interrupts: Interrupts,
    *,
    resume: bool,
    quiet: bool,
    evaluating: bool = False,
    hosts: Hosts | None = None,
) -> Run:
    hosts = hosts or Hosts()
    mesh = meshes.make(config)
    check_rows(mesh)
    c = config.checkpoints
    checkpoints = Checkpoints(directory / "checkpoints", keep=c.keep, best=c.best, read_only=evaluating)
    stack.callback(checkpoints.close)
    latest = hosts.first(checkpoints.latest() if resume else None)
    # A server that does not answer is known before the params are read.
    external = stack.enter_context(open_sampler(config, policy, directory)) if config.external.url is not None else None
    kept = (
        None
        if config.store is None or evaluating
        else open_store(config, policy, directory, resume=resume, index=hosts.index)
    )
    store = None if kept is None else stack.enter_context(kept)
    params = policies.initial_params(config, policy, meshes.placement(config, policy.model, mesh))
    r = config.rollout
    deadlines = Deadlines(
        start=r.start_deadline_s, reset=r.step_deadline_s, step=r.step_deadline_s, verify=r.step_deadline_s
    )
    # An evaluation beside a run at work must not take that run's processes for orphans.
    label = run_label(directory) + (f"-eval-{os.getpid()}" if evaluating else "")
    label += f"-{hosts.index}" if hosts.index else ""  # and of the processes of one run, one not another's
    if suite.reap is not None:
        suite.reap(label)
        stack.callback(suite.reap, label)
    if r.workers_url is None:
        pool: Pool | RayPool = Pool(config.environment, r.workers, deadlines, label=label)
    else:
        pool = RayPool(r.workers_url, config.environment, r.workers, deadlines, label=label)
    stack.callback(pool.close)
    grammars, grammar = constraint(config, policy, suite)
    engine = external or _engine(config, policy, grammars)
    place = directory / "evaluation" if evaluating else home(directory, hosts)
    sinks = stack.enter_context(RunSinks(place, figures=hosts.leads))
    progress = stack.enter_context(Progress(config.name, quiet=quiet or not hosts.leads))
    collector = stack.enter_context(_collector(config, policy, engine, pool, grammar))  # opened last: it uses the rest
    run = Run(
        config=config,
        directory=directory,
        suite=suite,
        policy=policy,
        engine=engine,
        pool=pool,
        collector=collector,
        sinks=sinks,
        progress=progress,
        checkpoints=checkpoints,
        mesh=mesh,
        params=params,
        buffer=Buffer(1 if config.loop is None else config.loop.group),
        interrupts=interrupts,
        store=store,
        hosts=hosts,
    )
    hosts.watch(lambda: run.clock.now, interrupts)
    if latest is not None:
        _go_back_to(run, checkpoints.record(latest))
    elif resume:  # it stopped before its first checkpoint
        run.sinks.truncate_after(lambda row: row["at"] > 0)
        if run.store is not None:
            run.store.truncate(0)
    return run


def _collector(
    config: RunConfig,
    policy: policies.Policy,
    engine: Engine | ExternalSampler,
    pool: Pool | RayPool,
    grammar: str | None,
) -> Collector:
    r = config.rollout
    driver = Driver(
        engine,
        pool,
        policy.renderer,
        max_turn_tokens=r.max_turn_tokens,
        grammar=grammar,
        max_segments=r.max_segments,
        evidence=r.evidence,
        stall_s=r.stall_s,
    )
    return Collector(driver, guard=partial(jax.transfer_guard, "disallow"))  # a guard holds for one thread


def _engine(config: RunConfig, policy: policies.Policy, grammars: Grammars | None) -> Engine:
    r = config.rollout
    return Engine(
        policy.model,
        slots=r.slots,
        context=r.context,
        bank=r.bank,
        prefill_chunk=r.prefill_chunk,
        decode_steps=r.decode_steps,
        stop_ids=policy.renderer.stop_ids,
        seed=config.seed,
        sharding=spread(meshes.samplers(config), r.tensor),
        grammars=grammars,
    )


def constraint(config: RunConfig, policy: policies.Policy, suite: Suite) -> tuple[Grammars | None, str | None]:
    """What reads grammars, and the one of every turn; both None without `rollout.constrain`.

    Raises `UserError` where a tool's schema, or the tokenizer, is beyond llguidance.
    """
    if config.rollout.constrain == "nothing":
        return None, None
    renderer, model = policy.renderer, policy.model
    try:
        vocabulary = renderer.vocabulary
        grammars = Grammars(vocabulary.tokenizer, vocab_size=model.vocab_size, stop_ids=renderer.stop_ids)
        grammar = call_grammar(renderer.calls, suite.spec.tools, vocabulary.controls)
        grammars.start(grammar)
    except ValueError as error:
        raise UserError(f"rollout.constrain={config.rollout.constrain!r}: {error}") from error
    return grammars, grammar


def _go_back_to(run: Run, record: dict[str, Any]) -> None:
    """Take up a checkpoint's position; rows and trajectories of later steps are dropped, since they will come again."""
    run.restored, run.at, run.version = record, int(record["at"]), int(record["version"])
    run.trained_tokens, run.clock = int(record["trained_tokens"]), Clock(record["seconds"])
    run.buffer = buffer_of(run, record)
    run.shown = record.get("shown", [])
    if run.store is not None:
        run.store.truncate(stored_of(record["stored"], run.hosts.index))
        run.stored_left = left_of(record["stored"], run.hosts.count)
    if run.hosts.leads:
        _cut_what_is_left(run, record)
    dropped = run.sinks.truncate_after(lambda row: row["at"] > run.at)
    run.progress.note(f"resumed at {record['stage']} step {record['step']}; {dropped} later rows will be written again")


def _evaluate_around(run: Run, stage: str) -> None:
    e = run.config.evaluation
    run.publish()
    row = evaluation.evaluate(run, stage=stage, split=e.split, episodes=e.episodes, seed=e.seed)
    run.evaluated({**row, "final": True})


def _cut_what_is_left(run: Run, record: dict[str, Any]) -> None:
    """Go back also in what processes wrote that are no more: there were more when the checkpoint was written."""
    gone = (path for path in (run.directory / HOSTS).glob("[0-9]*") if int(path.name) >= run.hosts.count)
    for path in gone:
        with RunSinks(path, figures=False) as sinks:
            sinks.truncate_after(lambda row: row["at"] > run.at)
    for index, length in enumerate(run.stored_left, run.hosts.count):
        with open_store(run.config, run.policy, run.directory, resume=True, index=index) as store:
            store.truncate(length)


def _has_evaluation(run: Run, stage: str, *, final: bool = True) -> bool:
    rows = run.evaluations() if run.hosts.leads else []  # another may see the file without its last lines
    return run.hosts.first(any(row["stage"] == stage and row.get("final", False) == final for row in rows))


def _index(config: RunConfig, stage: str) -> int:
    return [stage_name(s) for s in config.stages].index(stage)


def evaluate_run(config: RunConfig, directory: Path) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run with the `evaluation` settings of `config`; the run is left as it is."""
    suite, policy = resolve(config)
    meshes.check_mesh(config, policy.model)
    if not any((directory / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{directory}: no checkpoint to evaluate yet; let the run reach one (checkpoints.every)")
    with ExitStack() as stack:
        if config.external.url is not None:  # a run at work would go on with what is published here
            stack.enter_context(claimed(directory))
        interrupts = stack.enter_context(Interrupts())
        run = open_run(config, suite, policy, directory, stack, interrupts, resume=False, quiet=True, evaluating=True)
        latest = run.checkpoints.latest()
        assert latest is not None
        record = run.checkpoints.record(latest)
        run.params = with_trained(run.params, run.checkpoints.restore_params(latest, trained(run.params)))
        run.stage, run.step, run.at = record["stage"], record["step"], record["at"]
        e = config.evaluation
        run.publish()
        return evaluation.evaluate(run, stage=run.stage, split=e.split, episodes=e.episodes, seed=e.seed)


def summarize(run: Run) -> dict[str, Any]:
    """The figures of a finished run."""
    finals = {row["stage"]: row for row in run.evaluations() if row.get("final")}
    last = finals[stage_name(run.config.stages[-1])]
    names = {"before": "success_before"} | {s: f"success_after_{s}" for s in map(stage_name, run.config.stages)}
    return {
        "name": run.config.name,
        "seed": run.config.seed,
        **{names[stage]: finals[stage]["success"] for stage in names if stage in finals},
        "violation_rate": last["violation_rate"],
        "mean_tool_calls": last["mean_tool_calls"],
        "evaluation_episodes": last["scored"],
        "failures": last["failures"],
        "trained_tokens": run.trained_tokens,
        "optimizer_steps": run.at,
        "parameters": llama.param_count(run.policy.model),
        "wall_seconds": {name: round(s, 2) for name, s in run.clock.seconds.items()}
        | {"total": round(run.clock.total(), 2)},
        "versions": versions(run),
    }


def versions(run: Run) -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    spec = run.suite.spec
    found = {"agentrl-jax": __version__} | found
    return found | {
        "python": platform.python_version(),
        f"environment {spec.name}": spec.version,
        "verifier": run.suite.verifier_version,
    }
