"""HTTP: connections, bodies, keys, routing."""
