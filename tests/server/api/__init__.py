"""The APIs that generate text."""
