"""Other projects' loss heads on the same work, by their own code. None of them is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp


def installed(clip: float) -> Iterator[tuple[str, Callable[[Any], jax.Array]]]:
    """(name, inputs -> scalar loss) of every peer that is installed."""
    peers = {"rlax": ("rlax", partial(_rlax, clip=clip)), "tokamax": ("tokamax, plain CE", _tokamax)}
    return (peer for package, peer in peers.items() if find_spec(package) is not None)


def _rlax(inputs: Any, clip: float) -> jax.Array:
    """`clipped_surrogate_pg_loss` on `softmax().logprob` of all logits."""
    import rlax  # pyright: ignore[reportMissingImports]

    data, logits = inputs.data, (_read(inputs) @ inputs.unembedding.T).astype(jnp.float32)
    logprobs = rlax.softmax().logprob(inputs.tokens[0], logits)
    gains = data["advantages"][0] * data["weights"][0] * logprobs.size  # its loss is a mean
    return rlax.clipped_surrogate_pg_loss(jnp.exp(logprobs - data["old_logprobs"][0]), gains, clip)


def _tokamax(inputs: Any) -> jax.Array:
    """Summed cross-entropy: it takes no weights and returns no log-probabilities, so it cannot be a policy's loss."""
    import tokamax  # pyright: ignore[reportMissingImports]

    matrix = inputs.unembedding.T
    return tokamax.linear_softmax_cross_entropy_loss(_read(inputs), inputs.tokens[0], matrix, reduction="sum")


def _read(inputs: Any) -> jax.Array:
    return jnp.take(inputs.hidden[0], jnp.maximum(inputs.parents[0], 0), axis=0)
