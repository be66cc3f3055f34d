"""HTTP: connections, requests, bodies and routing, with their limits."""
