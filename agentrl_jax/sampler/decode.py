"""Decoding as a state machine over Q slots: prefill, copy a prefix, decode. Pure functions.

A slot's numbers depend on its own tokens, key and temperature only, to the bit: every row of every
product stands at a fixed place, attention skips nothing it would add, and each slot has its own key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.models import layers, rotary
from agentrl_jax.models.decoder import DecoderConfig, unembedding
from agentrl_jax.sampler import cache
from agentrl_jax.sampler.select import choose

Layers = tuple[jax.Array, ...]


class Slots(NamedTuple):
    """What Q slots hold. The cache has the first `lengths` tokens; `last` comes next and is not in it."""

    keys: Layers  # per layer [blocks, Q, J, BLOCK, C]
    values: Layers
    lengths: jax.Array  # i32[Q]
    last: jax.Array  # i32[Q]
    key: jax.Array  # u32[Q, 2] the turn's random key
    drawn: jax.Array  # i32[Q] tokens drawn with that key
    active: jax.Array  # bool[Q]
    remaining: jax.Array  # i32[Q] tokens it may still draw
    temperature: jax.Array  # f32[Q]


def allocate(config: DecoderConfig, slots: int, context: int) -> Slots:
    """Empty, inactive slots of `context` positions."""
    dtype = jnp.dtype(config.compute_dtype)

    def layers() -> Layers:
        shape = (slots, context, config.kv_heads, config.head_width)
        return tuple(cache.allocate(*shape, dtype) for _ in range(config.layers))

    def zeros(dtype: jax.typing.DTypeLike, *shape: int) -> jax.Array:
        return jnp.zeros((slots, *shape), dtype)

    return Slots(
        layers(), layers(), zeros(jnp.int32), zeros(jnp.int32), zeros(jnp.uint32, 2), zeros(jnp.int32),
        zeros(jnp.bool_), zeros(jnp.int32), zeros(jnp.float32),
    )  # fmt: skip


def prefill(
    config: DecoderConfig, params: Any, slots: Slots, rows: jax.Array, tokens: jax.Array, counts: jax.Array
) -> Slots:
    """Append tokens i32[R, S] (the first counts i32[R] of each row) to the caches of slots rows i32[R].

    The rows must be distinct; one with count 0 is untouched. No logits are computed. `lengths` advance.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = slots.lengths[rows][:, None] + columns
    keep = columns < counts[:, None]
    _, keys, values = _forward(config, params, slots, tokens, positions, keep, rows)
    return slots._replace(keys=keys, values=values, lengths=slots.lengths.at[rows].add(counts, unique_indices=True))


def copy_prefix(slots: Slots, source: jax.Array) -> Slots:
    """Slot q takes what slot source[q] holds (q itself: nothing changes): a prompt computed once. source i32[Q]."""
    lengths = slots.lengths[source]
    moved = source != jnp.arange(source.shape[0], dtype=source.dtype)
    keys, values = cache.copy((slots.keys, slots.values), source, jnp.max(jnp.where(moved, lengths, 0)))
    return slots._replace(keys=keys, values=values, lengths=lengths)


class _State(NamedTuple):
    step: jax.Array
    slots: Slots
    tokens: jax.Array
    logprobs: jax.Array
    emitted: jax.Array


def decode(
    config: DecoderConfig, params: Any, slots: Slots, steps: int, stop_ids: tuple[int, ...]
) -> tuple[Slots, jax.Array, jax.Array, jax.Array]:
    """Up to `steps` tokens for every active slot -> (slots, tokens i32[M, Q], logprobs f32[M, Q], emitted bool[M, Q]).

    A slot falls inactive after a stop id (emitted, with its log-probability) or when `remaining` reaches 0;
    the loop ends when none is active. Token n of a turn takes uniform(fold_in(key, n)).
    """
    shape = (steps, slots.lengths.shape[0])
    start = _State(
        jnp.int32(0), slots, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.bool_)
    )
    head = unembedding(config, params)
    stops = jnp.asarray(stop_ids, jnp.int32)

    def step(state: _State) -> _State:
        slots, active = state.slots, state.slots.active
        x, keys, values = _forward(
            config, params, slots, slots.last[:, None], slots.lengths[:, None], active[:, None], None
        )
        x = layers.norm(config, x[:, 0], params["final_norm"])
        logits = jnp.einsum("qd,vd->qv", x, head, preferred_element_type=jnp.float32)
        logits = layers.soft_cap(logits, config.final_soft_cap)
        tokens, logprobs = choose(logits, _uniforms(slots.key, slots.drawn), slots.temperature)
        one = active.astype(jnp.int32)
        remaining = slots.remaining - one
        stopped = jnp.any(tokens[:, None] == stops[None], axis=1)
        after = slots._replace(
            keys=keys, values=values, lengths=slots.lengths + one, drawn=slots.drawn + one, remaining=remaining,
            last=jnp.where(active, tokens, slots.last), active=active & ~stopped & (remaining > 0),
        )  # fmt: skip
        return _State(
            state.step + 1, after, state.tokens.at[state.step].set(jnp.where(active, tokens, 0)),
            state.logprobs.at[state.step].set(jnp.where(active, logprobs, 0.0)),
            state.emitted.at[state.step].set(active),
        )  # fmt: skip

    end = jax.lax.while_loop(lambda s: (s.step < steps) & jnp.any(s.slots.active), step, start)
    return end.slots, end.tokens, end.logprobs, end.emitted


def _uniforms(key: jax.Array, drawn: jax.Array) -> jax.Array:
    def draw(key: jax.Array, drawn: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), drawn))

    return jax.vmap(draw)(key, drawn)


def _forward(
    config: DecoderConfig, params: Any, slots: Slots, tokens: jax.Array, positions: jax.Array, keep: jax.Array,
    rows: jax.Array | None,
) -> tuple[jax.Array, Layers, Layers]:  # fmt: skip
    """Hidden states [R, S, D] before the final norm, and the caches with the kept tokens written."""
    where = jnp.arange(tokens.shape[0], dtype=jnp.int32) if rows is None else rows
    blocks = (jnp.max(jnp.where(keep, positions, 0)) // cache.BLOCK + 1).astype(jnp.int32)
    x = layers.embed(config, params["embedding"], tokens)
    tables = rotary.rotations(config, positions)
    caches = []
    for index, p in enumerate(params["layers"]):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: int = index) -> tuple[jax.Array, Any]:
            keys = cache.write(slots.keys[index], where, positions, k, keep)
            values = cache.write(slots.values[index], where, positions, v, keep)
            window = config.window_of(index)
            attended = cache.attend(
                q, keys, values, rows, positions, blocks, scale=config.scale,
                window=None if window is None else jnp.int32(window), soft_cap=config.attention_soft_cap,
            )  # fmt: skip
            return attended, (keys, values)

        rotation = tables[rotary.kind_of(config, index)]
        x, kept = layers.layer(config, p, x, rotation, attend, fixed_places=True)
        caches.append(kept)
    keys, values = zip(*caches, strict=True)
    return x, keys, values
