"""Decoder families, one a file. Pure functions of arrays."""
