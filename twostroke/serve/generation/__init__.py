"""The path of a generating request: prompt, sampling parameters, engine, response."""
