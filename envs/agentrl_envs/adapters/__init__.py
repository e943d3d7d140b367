"""Environments that people already have, run unchanged: one file per kind, each with a `suite(...)`.

A reward of None is unscored. Seeds are set explicitly. The policy sees observations and nothing else: no info dict, no
reward, no answer field. Forks replay the episode and check every observation.
"""
