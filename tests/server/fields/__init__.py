"""Fields of requests."""
