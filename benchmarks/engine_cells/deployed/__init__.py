"""Apps for a deployment of Flower: one that replies at once, and one that makes our rounds."""
