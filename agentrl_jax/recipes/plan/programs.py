"""The programs of a run as JAX traces them for shapes: what `recipes.rl` and `recipes.sft` would run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.learner.score import make_score
from agentrl_jax.models import llama
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes import rl, sft
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.plan import memory
from agentrl_jax.sampler import decode
from agentrl_jax.sampler.select import Cuts

_STOPS = 8
DECODED_LAYERS = 2  # of the sampler that is compiled: its layers are laid out one after another, and are all alike


class Program(NamedTuple):
    """One device function. `times` a step of the learner; `loops`: trips of loops whose length the data tell."""

    name: str
    traced: Any
    times: int
    loops: int
    learns: bool = True  # it is part of the step that is timed


def programs(config: RunConfig, model: llama.LlamaConfig, mesh: Any, host: memory.Host | None = None) -> list[Program]:
    """The update's functions, scoring where the run scores, and one decode dispatch of one copy of the sampler."""
    found = memory.parts(config, model, mesh)
    assert found.batch is not None
    stage, loop = memory.settings(config), config.loop
    scorer = policies.scorer_of(config, model)
    update = rl.update_of(loop, scorer) if loop is not None else sft.update_of(stage, scorer)  # pyright: ignore
    micro = memory.batch_rows(config) // stage.micro_rows
    updates = 1 if loop is None else loop.updates_per_batch
    chunks = memory.head_chunks(config, mesh)[1]
    traced = update.traced(found.state, found.batch)
    listed = [
        Program("update", traced["accumulate"], micro * updates, chunks),
        Program("apply", traced["apply"], updates, 1),
    ]
    scores = 0 if loop is None else memory.rescored(loop) + (loop.objective.kl is not None)
    if scores:
        score = make_score(scorer, micro_rows=stage.micro_rows)
        listed.append(Program("score", score.traced(found.state.params, found.batch), micro * scores, chunks))
    if found.sampler is not None:
        listed.append(
            Program("decode", _decode(config, model, mesh, host or memory.Host(mesh.size)), 0, 1, learns=False)
        )
    return listed


def _decode(config: RunConfig, model: llama.LlamaConfig, mesh: Any, host: memory.Host) -> Any:
    """One dispatch of the largest batch of a sampler of few layers."""
    few = replace(model, layers=min(model.layers, DECODED_LAYERS), window_layers=model.window_layers[:DECODED_LAYERS])
    found = memory.parts(config, few, mesh, host)
    rows = min(memory.ROWS, memory.slots(config, host.devices))
    width = -(-config.rollout.context // memory.PAGE)
    pools = jax.tree.map(lambda leaf: leaf.sharding, found.pools)
    everywhere = NamedSharding(jax.tree.leaves(pools)[0].mesh, PartitionSpec())

    def put(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    cuts = Cuts(*(put(dtype, rows) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)))
    arguments = decode.Rows(
        table=put(jnp.int32, rows, width), lengths=put(jnp.int32, rows), last=put(jnp.int32, rows),
        key=put(jnp.uint32, rows, 2), drawn=put(jnp.int32, rows), active=put(jnp.bool_, rows),
        remaining=put(jnp.int32, rows), stops=put(jnp.int32, rows, _STOPS), cuts=cuts,
    )  # fmt: skip
    step = partial(decode.decode, few, steps=config.rollout.decode_steps, stop_ids=(0,))
    placed: Any = jax.jit(step, donate_argnums=1, out_shardings=(pools, everywhere))
    return placed.trace(found.sampler, found.pools, arguments, put(jnp.int32))
