"""The path of a request: prompt, sampling parameters, generation, conversation."""
