"""A small batch for a loss head, and the formula in float64 numpy: values by definition, gradients by Jacobians."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest


class Sample(NamedTuple):
    hidden: np.ndarray  # f32[B, T, D]
    head: np.ndarray  # f32[V, D]
    tokens: np.ndarray  # i32[B, T]
    parents: np.ndarray  # i32[B, T]
    mask: np.ndarray  # bool[B, T]

    @property
    def columns(self):
        return tuple(map(jnp.asarray, self[2:]))

    @property
    def arrays(self):
        return tuple(map(jnp.asarray, self))


def _draw(seed=0, actions=0.6, rows=3, length=7, width=4, vocabulary=11):
    """Rows that are trees: several tokens may continue the same one."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    parents = np.stack([[rng.integers(-1, t) if t else -1 for t in range(length)] for _ in range(rows)])
    return Sample(
        hidden=rng.normal(size=(*shape, width)).astype(np.float32),
        head=rng.normal(size=(vocabulary, width)).astype(np.float32),
        tokens=rng.integers(0, vocabulary, shape).astype(np.int32),
        parents=parents.astype(np.int32),
        mask=(rng.random(shape) < actions) & (parents >= 0),
    )


def _exact(sample, temperature=1.0, soft_cap=None, pull=None, push=None):
    """(logprobs, entropy, dhidden, dhead) in float64; pull and push are the loss's gradients by the first two."""
    hidden, head = (np.asarray(x, np.float64) for x in sample[:2])
    logprobs, entropy = np.zeros(sample.mask.shape), np.zeros(sample.mask.shape)
    dhidden, dhead = np.zeros_like(hidden), np.zeros_like(head)
    for b, t in np.argwhere(sample.mask):
        state = hidden[b, sample.parents[b, t]]
        raw = head @ state
        logits = (raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)) / temperature
        log_p = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        p = np.exp(log_p)
        logprobs[b, t], entropy[b, t] = log_p[sample.tokens[b, t]], -(p * log_p).sum()
        if pull is None:
            continue
        softmax_jacobian = np.diag(p) - np.outer(p, p)
        dlogits = pull[b, t] * ((np.arange(len(p)) == sample.tokens[b, t]) - p)
        dlogits = dlogits - (0.0 if push is None else push[b, t]) * softmax_jacobian @ (log_p + 1)
        draw = dlogits / temperature * (1.0 if soft_cap is None else 1 - np.tanh(raw / soft_cap) ** 2)
        dhidden[b, sample.parents[b, t]] += draw @ head
        dhead += np.outer(draw, state)
    return logprobs, entropy, dhidden, dhead


@pytest.fixture(scope="session")
def draw():
    return _draw


@pytest.fixture(scope="session")
def exact():
    return _exact
