"""Serves slices and adds up updates over a network: published rounds, routes, processes."""
