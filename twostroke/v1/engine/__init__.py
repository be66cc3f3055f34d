"""vLLM's package of the asynchronous engine."""
