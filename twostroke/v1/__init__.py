"""Where vLLM's users import parts of its engine from."""
