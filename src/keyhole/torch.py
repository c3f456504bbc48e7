"""Models in PyTorch: `kh.torch.Model`; needs the extra `torch`."""

from keyhole.models.torch_model import TorchModel

Model = TorchModel
