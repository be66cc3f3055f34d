"""The APIs that generate text, one folder for each."""
