"""What is trained, in JAX: the paper's four models, models of your own, derived deselects."""

from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.models.logistic import tag_regression
from keyhole.models.model import Model
from keyhole.models.transformer import TransformerSizes, transformer
from keyhole.models.transpose import derive_deselect

__all__ = [
    "Model",
    "TransformerSizes",
    "cnn",
    "derive_deselect",
    "tag_regression",
    "transformer",
    "two_layer",
]
