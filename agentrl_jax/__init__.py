"""Train LLM agents by reinforcement learning, natively on JAX.

Importing the package loads no JAX: environment workers import `agentrl_jax.protocol`
by the hundred, and on a TPU host a second process that touches the backend fights
the learner for the chips.
"""

__version__ = "0.1.0"
