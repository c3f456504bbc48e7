"""Trains a model of your own on data of your own, in a few lines."""
