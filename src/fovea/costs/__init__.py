"""What a kernel would cost on a machine: a model, never a measurement."""
