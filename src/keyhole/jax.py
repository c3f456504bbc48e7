"""Models in JAX: `kh.jax.Model`, which is `kh.Model`."""

from keyhole.models.model import Model as Model
