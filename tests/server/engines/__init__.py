"""The server over engines in other processes: deaths, transfers, transports."""
