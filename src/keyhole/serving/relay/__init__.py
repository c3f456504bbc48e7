"""Blind relay over sockets: the gateway in the service, the relay, and the device behind both."""
