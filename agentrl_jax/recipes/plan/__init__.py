"""What a run needs of a TPU slice and how fast it can go there, from any machine."""
