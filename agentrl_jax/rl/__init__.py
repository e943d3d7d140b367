"""The mathematics: pure functions over one group, one trajectory or one packed batch; callers `vmap` and `jit`."""
