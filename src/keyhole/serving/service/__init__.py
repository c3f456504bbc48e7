"""The service: routes, access, limits, metrics, and the processes that answer."""
