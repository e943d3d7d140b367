"""Decoding as a state machine over paged caches: prefill tiles of tokens, decode rows. Pure functions.

A row's numbers depend on its own tokens, key and settings only, to the bit: a product's rows do not mix,
attention skips nothing it would add, and each row has its own key. Which row of a batch it is makes no
difference; how many rows the batch has may (a matrix library may order a sum by it), which the engine checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.kept import words
from agentrl_jax.models import layers, rotary
from agentrl_jax.models.decoder import DecoderConfig, unembedding
from agentrl_jax.sampler import pages as cache
from agentrl_jax.sampler.placement import whole
from agentrl_jax.sampler.select import Cuts, choose, choose_among

Layers = tuple[jax.Array, ...]


class Cache(NamedTuple):
    """The pools of every layer."""

    keys: Layers  # [P, J, C, PAGE] each
    values: Layers  # [P, J, PAGE, C] each


class Rows(NamedTuple):
    """What R rows decode from. Their pages hold the first `lengths` tokens; `last` comes next and is not in them."""

    table: jax.Array  # i32[R, W]
    lengths: jax.Array  # i32[R]
    last: jax.Array  # i32[R]
    key: jax.Array  # u32[R, 2] the turn's random key
    drawn: jax.Array  # i32[R] tokens drawn with that key
    active: jax.Array  # bool[R]
    remaining: jax.Array  # i32[R] tokens it may still draw
    stops: jax.Array  # i32[R, S] further ids that end its turn; -1 is none
    cuts: Cuts


class Drawn(NamedTuple):
    """The tokens of one decode call, step by step; what is not `emitted` is 0."""

    tokens: jax.Array  # i32[M, R]
    logprobs: jax.Array  # f32[M, R]
    raw_logprobs: jax.Array  # f32[M, R]
    emitted: jax.Array  # bool[M, R]
    kept: jax.Array  # u32[M, R, words(V)]


def allocate(config: DecoderConfig, pages: int) -> Cache:
    """Empty pools of `pages` pages."""
    shape = (pages, config.kv_heads, config.head_width, jnp.dtype(config.compute_dtype))
    return Cache(
        tuple(cache.allocate_keys(*shape) for _ in range(config.layers)),
        tuple(cache.allocate_values(*shape) for _ in range(config.layers)),
    )


def prefill(
    config: DecoderConfig, params: Any, pools: Cache, table: jax.Array, starts: jax.Array, tokens: jax.Array,
    counts: jax.Array,
) -> Cache:  # fmt: skip
    """Write the keys and values of tokens i32[R, S] (the first counts i32[R] of each row), from position starts i32[R].

    A row is a tile: a long prompt may take several rows of one call, since every layer writes before it reads.
    No logits are computed. table i32[R, W].
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = starts[:, None] + columns
    _, pools = _forward(config, params, pools, tokens, positions, columns < counts[:, None], table)
    return pools


class _State(NamedTuple):
    step: jax.Array
    pools: Cache
    rows: Rows
    drawn: Drawn


def decode(
    config: DecoderConfig,
    params: Any,
    pools: Cache,
    rows: Rows,
    floor: jax.Array,
    steps: int,
    stop_ids: tuple[int, ...],
    allowed: jax.Array | None = None,
) -> tuple[Cache, Drawn]:
    """Up to `steps` tokens for every active row.

    A row falls inactive after a stop id (emitted, with its log-probability) or when `remaining` reaches 0;
    the loop ends when at most `floor` i32[] rows are active: what is left fits a smaller batch, or is nothing.
    Token n of a turn takes uniform(fold_in(key, n)). `allowed` u32[R, words(V)] names, as bits, the tokens that the
    next one may be; what may follow is for the host to say, so with it there is one step.

    Raises `ValueError` where `allowed` comes with more steps.
    """
    if allowed is not None and steps != 1:
        raise ValueError(f"decode: steps: expected 1, since `allowed` speaks of the next token only, got {steps}")
    shape = (steps, rows.lengths.shape[0])
    start = _State(jnp.int32(0), pools, rows, Drawn(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, jnp.bool_), jnp.zeros((*shape, words(config.vocab_size)), jnp.uint32),
    ))  # fmt: skip
    head = unembedding(config, params)
    stops = jnp.asarray(stop_ids, jnp.int32)

    def step(state: _State) -> _State:
        rows, active = state.rows, state.rows.active
        x, pools = _forward(
            config, params, state.pools, rows.last[:, None], rows.lengths[:, None], active[:, None], rows.table
        )
        x = layers.norm(config, x[:, 0], params["final_norm"], fixed_places=True)
        logits = jnp.einsum("qd,vd->qv", x, head, preferred_element_type=jnp.float32)
        logits = whole(layers.soft_cap(logits, config.final_soft_cap))
        uniforms = _uniforms(rows.key, rows.drawn)
        if allowed is None:
            choice = choose(logits, uniforms, rows.cuts)
        else:
            choice = choose_among(logits, uniforms, rows.cuts, allowed)
        tokens, one = choice.tokens, active.astype(jnp.int32)
        remaining = rows.remaining - one
        stopped = jnp.any(tokens[:, None] == stops[None], axis=1) | jnp.any(tokens[:, None] == rows.stops, axis=1)
        after = rows._replace(
            lengths=rows.lengths + one, drawn=rows.drawn + one, remaining=remaining,
            last=jnp.where(active, tokens, rows.last), active=active & ~stopped & (remaining > 0),
        )  # fmt: skip
        new = (tokens, choice.logprobs, choice.raw_logprobs, active, choice.kept)
        drawn = Drawn(*(
            old.at[state.step].set(jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)))
            for old, x in zip(state.drawn, new, strict=True)
        ))  # fmt: skip
        return _State(state.step + 1, pools, after, drawn)

    end = jax.lax.while_loop(lambda s: (s.step < steps) & (jnp.sum(s.rows.active) > floor), step, start)
    return end.pools, end.drawn


def _uniforms(key: jax.Array, drawn: jax.Array) -> jax.Array:
    def draw(key: jax.Array, drawn: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), drawn))

    return jax.vmap(draw)(key, drawn)


def _forward(
    config: DecoderConfig, params: Any, pools: Cache, tokens: jax.Array, positions: jax.Array, keep: jax.Array,
    table: jax.Array,
) -> tuple[jax.Array, Cache]:  # fmt: skip
    """Hidden states [R, S, D] before the final norm, and the pools with the kept tokens written."""
    blocks = jnp.max(jnp.where(keep, positions, 0), axis=1) // cache.PAGE + 1
    x = layers.embed(config, params["embedding"], tokens)
    tables = rotary.rotations(config, positions)
    written = []
    for index, p in enumerate(params["layers"]):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: int = index) -> tuple[jax.Array, Any]:
            keys, values = cache.write(pools.keys[index], pools.values[index], table, positions, k, v, keep)
            window = config.window_of(index)
            attended = cache.attend(
                q, keys, values, table, positions, blocks, scale=config.scale,
                window=None if window is None else jnp.int32(window), soft_cap=config.attention_soft_cap,
            )  # fmt: skip
            return attended, (keys, values)

        rotation = tables[rotary.kind_of(config, index)]
        x, pair = layers.layer(config, p, x, rotation, attend, fixed_places=True)
        written.append(pair)
    keys, values = zip(*written, strict=True)
    return x, Cache(keys, values)
