"""HTTP: connections, requests, bodies, routing, and their limits."""
