"""Says what device and service send each other: messages, manifests, HTTP."""
