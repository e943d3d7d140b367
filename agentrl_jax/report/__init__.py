"""A run directory becomes pages that a person looks at. Reads files, imports no JAX."""
