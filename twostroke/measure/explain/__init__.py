"""Explanations of the time of a request or a step: phases, why, profile, timeline."""
