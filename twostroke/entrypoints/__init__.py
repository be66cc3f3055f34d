"""Modules with which vLLM's start commands work: only the name of the package differs."""
