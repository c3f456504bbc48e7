"""The devices: with PyTorch where it is installed, else with NumPy."""

from importlib.util import find_spec

from flower_example.model import make_clients, train_numpy
from keyhole.device.take_part import PopulationClient
from keyhole.engines.flower.client_app import make_client_app


def participant_of(client, context):
    """What a client does in a round: chooses its keys, trains on its slices."""
    train = train_numpy
    if find_spec("torch") is not None:
        from flower_example.module import train_torch as train
    return PopulationClient(client, lambda settings: make_clients(train)).participant()


app = make_client_app(participant_of)
