"""Models in PyTorch: `kh.torch.Model`, and cuts of language models; needs the extra `torch`."""

from keyhole.models.torch_layers import LayerCut, from_module, whole_module
from keyhole.models.torch_llm import (
    expert_cut,
    load_trained,
    lora_cut,
    neuron_cut,
    save_trained,
    vocabulary_cut,
)
from keyhole.models.torch_model import TorchModel

Model = TorchModel

__all__ = [
    "LayerCut",
    "Model",
    "expert_cut",
    "from_module",
    "load_trained",
    "lora_cut",
    "neuron_cut",
    "save_trained",
    "vocabulary_cut",
    "whole_module",
]
