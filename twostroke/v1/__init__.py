"""The part of vLLM's package `v1` that programs import."""
