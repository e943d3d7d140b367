"""An OpenAI-compatible HTTP server over the engine: `app` (routes) on `pump` (the thread that owns the sampler)."""
