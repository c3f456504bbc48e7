"""How a client chooses its keys."""

from keyhole.keys.budget import DeviceClass, assign_device, keys_within

__all__ = ["DeviceClass", "assign_device", "keys_within"]
