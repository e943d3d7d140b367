"""Arrays meet the world: engine, publication, checkpoints, files, the loop."""
