"""Wiring: a run is a list of stages over one policy."""
