"""A planner: which layout of engines serves a trace within its goals, by simulation.

engine.py      an engine whose steps are timed by a model: the product's Scheduler and KV cache
handover.py    the network between pools: copies that take bytes over bandwidth
steptimes.py   step times from measured steps, or from a roofline, with their error
calibrate.py   load for a running server, so that its records have steps of many sizes
layout.py      engines and pools that are tried
simulate.py    a trace through a layout: every request's times
predict.py     figures with intervals, from several simulations
search.py      the cheapest layout that meets goals
check.py       a trace replayed against a server: predicted beside measured
report.py      a plan for people and for programs
"""
