"""Slices and updates over a network: published rounds, the service, the device."""

from keyhole.serving.access import Access, Keyring, new_key
from keyhole.serving.app import App
from keyhole.serving.coordinator import Pace, admit
from keyhole.serving.device import Device
from keyhole.serving.limits import Limits
from keyhole.serving.on_demand_rounds import OnDemandRounds
from keyhole.serving.participation import Participant, run, take_part
from keyhole.serving.population import PopulationClient
from keyhole.serving.publishing import Publisher
from keyhole.serving.reading import RoundsDirectory
from keyhole.serving.retrying import Retry
from keyhole.serving.served import Served, device_name
from keyhole.serving.slice_cache import SliceCache
from keyhole.serving.transport import serving
from keyhole.serving.update_spool import UpdateSpool

__all__ = [
    "Access",
    "App",
    "Device",
    "Keyring",
    "Limits",
    "OnDemandRounds",
    "Pace",
    "Participant",
    "PopulationClient",
    "Publisher",
    "Retry",
    "RoundsDirectory",
    "Served",
    "SliceCache",
    "UpdateSpool",
    "admit",
    "device_name",
    "new_key",
    "run",
    "serving",
    "take_part",
]
