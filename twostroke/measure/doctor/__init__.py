"""The diagnosis of a slow server."""
