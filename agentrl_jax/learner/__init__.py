"""One optimisation step: score, accumulate gradients over micro-batches, apply."""
