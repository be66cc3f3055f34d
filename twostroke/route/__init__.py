"""Several engines behind one server.

pool_settings.py    `PoolSettings`: the number of engines, and their settings
routed_engine.py    `RoutedEngine`: all engines, with the interface of one engine
routed_requests.py  `RoutedRequests`: sends requests to engines; moves them if an engine dies
router.py           `Router`: chooses engines, from plain numbers (no engine, clock or message)
costs.py            `StepCosts`: the time of work in an engine, learnt from its step records
hand_over.py        `HandOvers`: KV blocks on their way between engines
member.py           `Member`: one engine; `RoutedRequest`: one request
scaling.py          `Scaling`: starts and removes engines while the server runs
autoscale.py        `Autoscaler`: decides when pools grow and shrink
on_ray.py           `RayCluster`: engines as actors of a Ray cluster
"""
