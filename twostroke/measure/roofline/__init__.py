"""Lower bounds on the time of prefill and decode, from a model and a machine."""
