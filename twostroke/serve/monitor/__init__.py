"""What operators read: Prometheus metrics, traces, the log line, GPU figures."""
