"""Modules for launch lines of vLLM: only the name of the package differs."""
