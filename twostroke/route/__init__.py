"""Several engines behind one server: which of them does what for a request.

router.py   the decision, from plain numbers: no engine, no clock, no message
costs.py    what work takes in an engine, from the records of its steps
member.py   one of the engines, and where a request stands that is in it
client.py   `RoutedEngine`: all of them as a server uses one; what happens when one dies
pools.py    which engines there are, from the settings
scaling.py  more of them, or fewer, while they serve
autoscale.py  when there should be more, or fewer
on_ray.py   as actors of a Ray cluster; elsewhere they are processes of this machine
"""
