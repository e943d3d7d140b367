"""Decoding as a state machine: pure functions of arrays."""
