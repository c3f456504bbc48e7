"""What is trained, in JAX, and the deselect functions derived from JAX select functions."""

from keyhole.models.transpose import derive_deselect

__all__ = ["derive_deselect"]
