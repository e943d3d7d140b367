"""Decoding as a state machine over Q slots: prefill, copy a prefix, decode. Pure functions.

A slot's numbers depend on its own tokens, key and temperature only, to the bit: every row of every
product stands at a fixed place, attention skips nothing it would add, and each slot has its own key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.models.layers import rms_norm, rope, swiglu
from agentrl_jax.models.llama import LlamaConfig, unembedding
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


def allocate(config: LlamaConfig, slots: int, context: int) -> Slots:
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
    config: LlamaConfig, params: Any, slots: Slots, rows: jax.Array, tokens: jax.Array, counts: jax.Array
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
    config: LlamaConfig, params: Any, slots: Slots, steps: int, stop_ids: tuple[int, ...]
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
        x = rms_norm(x[:, 0], params["final_norm"], config.norm_eps)
        logits = jnp.einsum("qd,vd->qv", x, head, preferred_element_type=jnp.float32)
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
    config: LlamaConfig, params: Any, slots: Slots, tokens: jax.Array, positions: jax.Array, keep: jax.Array,
    rows: jax.Array | None,
) -> tuple[jax.Array, Layers, Layers]:  # fmt: skip
    """Hidden states [R, S, D] before the final norm, and the caches with the kept tokens written."""
    r, s = tokens.shape
    h, j, c = config.heads, config.kv_heads, config.head_width
    where = jnp.arange(r, dtype=jnp.int32) if rows is None else rows
    blocks = (jnp.max(jnp.where(keep, positions, 0)) // cache.BLOCK + 1).astype(jnp.int32)
    x = params["embedding"][tokens].reshape(r * s, config.width)
    keys, values = [], []
    for p, key_cache, value_cache in zip(params["layers"], slots.keys, slots.values, strict=True):
        y = (rms_norm(x, p["attention_norm"], config.norm_eps) @ p["qkv"]).reshape(r, s, h + 2 * j, c)
        turned = rope(y[:, :, : h + j], positions, config.rope_theta)
        key_cache = cache.write(key_cache, where, positions, turned[:, :, h:], keep)
        value_cache = cache.write(value_cache, where, positions, y[:, :, h + j :], keep)
        a = cache.attend(turned[:, :, :h], key_cache, value_cache, rows, positions, blocks)
        x = x + a.reshape(r * s, h * c).astype(x.dtype) @ p["out"]
        gate, up = jnp.split(rms_norm(x, p["mlp_norm"], config.norm_eps) @ p["gate_up"], 2, axis=1)
        x = x + swiglu(gate, up) @ p["down"]
        keys.append(key_cache)
        values.append(value_cache)
    return x.reshape(r, s, config.width), tuple(keys), tuple(values)
