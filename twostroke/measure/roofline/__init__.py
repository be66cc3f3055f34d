"""Floors of both phases from a model and a machine."""
