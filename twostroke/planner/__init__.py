"""A planner that finds, by simulation, the layout of engines that serves a trace within goals.

engine.py      a simulated engine: the product's Scheduler and KV cache with modelled step times
handover.py    the simulated network between pools
offload.py     simulated hits in a KV offload tier
speculation.py simulated drafts, right with a given probability
stretch.py     the scheduler with a shortcut for many equal decode steps
steptimes.py   step times from measured steps or from a roofline, with their error
learned.py     step times from a data sheet with learned efficiencies (learned.json)
calibrate.py   load for a running server, to record steps of many sizes
layout.py      the engines and pools to simulate
simulate.py    the simulation of a trace on a layout
predict.py     figures with intervals, from several simulations
search.py      the cheapest layout that meets goals
check.py       a trace replayed against a server, to compare predicted with measured figures
kept_checks.py results of checks, which correct the step times of later plans
advice.py      the pools that a running server should have, from its own records
load_curve.py  the latencies of layouts at several loads
plan_page.py   a plan as an HTML file with pictures
report.py      a plan as a terminal report and as JSON
"""
