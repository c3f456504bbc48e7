"""The client's model as a `torch.nn.Module`; needs PyTorch."""

import torch

import keyhole as kh
from flower_example.model import ITEM, RATE, RATINGS, STEPS, WIDTH


class Ratings(torch.nn.Module):
    """Vectors of the client's own items, and the readout."""

    def __init__(self, item):
        super().__init__()
        self.items = torch.nn.Embedding(item, WIDTH)
        self.readout = torch.nn.Linear(WIDTH, 1)

    def forward(self, batch):
        return self.readout(self.items(batch["item"]))[:, 0]


def loss(outputs, batch):
    return torch.nn.functional.mse_loss(outputs, batch["liked"])


# Each step is on all ratings of a client.
MODEL = kh.torch.Model(Ratings, loss, cuts=[kh.Cut(ITEM, {"items.weight": 0})])
train_torch = MODEL.trainer(kh.ClientUpdate(client_lr=RATE, epochs=STEPS, batch_size=RATINGS))
