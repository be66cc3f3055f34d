"""Where vLLM's users import the metrics of `LLM.get_metrics` from."""
