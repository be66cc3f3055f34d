"""Where the time of a request or a step went: phases, why, profile, timeline."""
