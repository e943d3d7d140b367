"""Device kernels, each as a plain-JAX function that says what is computed."""
