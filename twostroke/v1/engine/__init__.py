"""Where vLLM's users import the asynchronous engine from."""
