"""Load tests of a server or an engine: workloads, clients, figures, reports."""
