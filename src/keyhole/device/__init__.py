"""Takes part in rounds on a device: fetches, verifies, caches, trains, sends."""
