"""The device: fetches, verifies, caches, resumes, takes part."""
