"""Slices and updates over a network: slice files, the service, the device."""
