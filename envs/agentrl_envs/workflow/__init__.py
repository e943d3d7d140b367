"""A retail service's tenant: look up, then change what the customer asks for, or refuse what the policy forbids.

Each episode has a tenant of its own, in SQLite or in PostgreSQL. Requests are sentences; the verifier compares the
tenant before and after. `suite(...)` is the whole interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite

from . import attacks, demonstrations, drills, dry, solve, tasks, tools, verifier, vocabulary
from .env import WorkflowEnvironment
from .options import BACKENDS, KINDS, LOOKUP, MAX_CALLS, POLICIES, Options

__all__ = ["BACKENDS", "KINDS", "LOOKUP", "POLICIES", "missing", "suite"]
VERSION = "1"


def missing(backend: str = "sqlite") -> str | None:
    """What this machine lacks for a back end, with the command that installs it, or None."""
    if backend != "postgres":
        return None
    from . import postgres

    return postgres.missing()


def suite(
    handles: str = "short",
    wording: str = "plain",
    kinds: Sequence[str] | None = None,
    policies: Sequence[str] | None = None,
    system: str | None = None,
    sloppiness: float = 0.6,
    max_calls: int = MAX_CALLS,
    dry_run: bool = False,
    backend: str = "sqlite",
) -> Suite:
    """The workflow suite.

    `handles`: "short" (numbers 0..99) or "real" (`#W2611340`); `wording`: "plain" (few words) or "free" (natural
    sentences). `kinds`: which requests, all of `KINDS` by default; a kind named twice comes twice as often, and
    "lookup" adds trivial requests that teach copying a handle. `policies`: which rules hold (of `POLICIES`).
    `system`: "none", "short" or "full" policy text; by default "none" for plain wording and "full" for free.
    `sloppiness`: how often a demonstration has a fault. `dry_run`: each write is to be run dry first. `backend`:
    "sqlite" or "postgres" (a database of a server that is started here; RuntimeError where `missing(backend)` says
    what it lacks); what the policy sees is the same. Unknown values raise ValueError and name the known ones.
    """
    options = Options(
        handles=handles,
        wording=wording,
        kinds=KINDS if kinds is None else tuple(kinds),
        policies=POLICIES if policies is None else tuple(policies),
        system=system if system is not None else "full" if wording == "free" else "none",
        sloppiness=sloppiness,
        max_calls=max_calls,
        dry_run=dry_run,
        backend=backend,
    )
    if lacks := missing(backend):
        raise RuntimeError(lacks)
    finish = "finish"  # the same word in both dialects
    spec = EnvironmentSpec(
        name="workflow",
        version=VERSION,
        tools=dry.described(options, tools.describe(handles)),
        budget=Budget(
            steps=max_calls,
            tool_calls=max_calls,
            write_actions=6 if dry_run else 3,
            retries=4,
            finishing=(finish,),
        ),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=lambda: WorkflowEnvironment(spec, options),
        tasks=partial(tasks.tasks, options),
        verify=partial(verifier.verify, options),
        verifier_version=verifier.VERSION,
        solve=partial(solve.solve, options),
        attacks=partial(attacks.attacks, options),
        hidden=("goal", "finish", "reason", "evidence", "calls"),
        demonstrate=partial(demonstrations.demonstrate, options),
        vocabulary=partial(vocabulary.vocabulary, options),
        handles=(lambda: [str(number) for number in range(100)]) if handles == "short" else None,
        drills=partial(drills.drills, options) if handles == "short" else None,
        reap=_reap if backend == "postgres" else None,
    )


def _reap(label: str) -> int:
    from . import postgres

    return postgres.reap(label)
