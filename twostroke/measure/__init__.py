"""Measuring tools for any OpenAI-compatible server. Nothing here imports torch or needs a GPU."""
