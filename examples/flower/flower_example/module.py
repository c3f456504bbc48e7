"""The client's model as a `torch.nn.Module`; needs PyTorch."""

import torch

from flower_example.model import RATE, STEPS
from keyhole.rounds.torch_update import TorchUpdate


class Ratings(torch.nn.Module):
    """Vectors of the client's own items, and the readout."""

    def __init__(self, items, width):
        super().__init__()
        self.items = torch.nn.Embedding(items, width)
        self.readout = torch.nn.Linear(width, 1)

    def forward(self, rows):
        return self.readout(self.items(rows))[:, 0]


def make(slices):
    """A module for as many items as the client has slices."""
    return Ratings(*slices["items"]["weight"].shape)


def train(module, data, generator):
    """Trains in place; plain SGD on all ratings needs no randomness."""
    rows, liked = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(rows), liked).backward()
        optimizer.step()


train_torch = TorchUpdate(make, train)
