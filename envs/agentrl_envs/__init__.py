"""Environments for `agentrl_jax`, one folder each. `agentrl_jax.protocol` is all that they share with the trainer."""
