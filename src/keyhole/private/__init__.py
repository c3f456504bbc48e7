"""The same meaning, less seen: private retrieval of slices, blind relays, enclaves."""
