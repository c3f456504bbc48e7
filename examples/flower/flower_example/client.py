"""The devices: with PyTorch where it is installed, else with NumPy."""

from importlib.util import find_spec

from flower_example.model import make_clients, train_numpy
from keyhole.engines.flower import make_client_app
from keyhole.serving.device.population import PopulationClient


def participant_of(client, context):
    """What a client does in a round: chooses its keys, trains on its slices."""
    train = train_numpy
    if find_spec("torch") is not None:
        from flower_example.module import train_torch as train
    return PopulationClient(client, lambda settings: make_clients(train)).participant()


app = make_client_app(participant_of)
