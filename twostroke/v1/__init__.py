"""vLLM's package of engine parts."""
