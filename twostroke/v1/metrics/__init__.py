"""vLLM's package of the metrics of `LLM.get_metrics`."""
