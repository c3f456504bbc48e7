"""Slices and updates over a network: published rounds, the service, the device."""

from typing import TYPE_CHECKING

from keyhole.lazy import names_on_demand

if TYPE_CHECKING:
    from keyhole.serving.coordinator import Pace, admit
    from keyhole.serving.device.device import Device
    from keyhole.serving.device.participation import (
        Participant,
        fetch_at_home,
        keep_taking_part,
        take_part,
    )
    from keyhole.serving.device.population import PopulationClient
    from keyhole.serving.device.retrying import Retry
    from keyhole.serving.device.slice_cache import SliceCache
    from keyhole.serving.files.publishing import Publisher
    from keyhole.serving.files.reading import RoundsDirectory
    from keyhole.serving.files.update_spool import UpdateSpool
    from keyhole.serving.inbox import SpoolInbox, device_name
    from keyhole.serving.on_demand.rounds import OnDemandRounds
    from keyhole.serving.pir.pir_fetch import OneServerFetch, PirFetch
    from keyhole.serving.pir.routes import pir_routes
    from keyhole.serving.pir.settings import PirSettings
    from keyhole.serving.relay.gateway_routes import gateway_routes
    from keyhole.serving.relay.relay import RelayApp
    from keyhole.serving.relay.relayed_fetch import RelayedFetch
    from keyhole.serving.served import Served
    from keyhole.serving.service.access import Access, Keyring, new_key
    from keyhole.serving.service.app import App
    from keyhole.serving.service.limits import Limits
    from keyhole.serving.service.transport import serving

__all__ = [
    "Access",
    "App",
    "Device",
    "Keyring",
    "Limits",
    "OnDemandRounds",
    "OneServerFetch",
    "Pace",
    "Participant",
    "PirFetch",
    "PirSettings",
    "PopulationClient",
    "Publisher",
    "RelayApp",
    "RelayedFetch",
    "Retry",
    "RoundsDirectory",
    "Served",
    "SliceCache",
    "SpoolInbox",
    "UpdateSpool",
    "admit",
    "device_name",
    "fetch_at_home",
    "gateway_routes",
    "keep_taking_part",
    "new_key",
    "pir_routes",
    "serving",
    "take_part",
]

__getattr__ = names_on_demand(__name__, __file__)
