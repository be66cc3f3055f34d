"""Monitoring: Prometheus metrics, traces, the stats log line, GPU figures."""
