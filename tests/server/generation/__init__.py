"""The path of a request: prompts, tools, streams."""
