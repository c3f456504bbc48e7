"""Models in PyTorch: `kh.torch.Model`, and cuts of language models; needs the extra `torch`."""

from keyhole.models.torch_layers import LayerCut as LayerCut
from keyhole.models.torch_layers import from_module as from_module
from keyhole.models.torch_layers import whole_module as whole_module
from keyhole.models.torch_llm import expert_cut as expert_cut
from keyhole.models.torch_llm import load_trained as load_trained
from keyhole.models.torch_llm import lora_cut as lora_cut
from keyhole.models.torch_llm import neuron_cut as neuron_cut
from keyhole.models.torch_llm import save_trained as save_trained
from keyhole.models.torch_llm import vocabulary_cut as vocabulary_cut
from keyhole.models.torch_model import TorchModel

Model = TorchModel
