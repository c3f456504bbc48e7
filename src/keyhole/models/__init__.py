"""What is trained, in JAX: the paper's four models, models of your own, derived deselects."""
