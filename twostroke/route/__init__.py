"""Several engines behind one server: which of them does what for a request.

router.py   the decision, from plain numbers: no engine, no clock, no message
member.py   one of the engines, and where a request stands that is in it
client.py   `RoutedEngine`: all of them as a server uses one; what happens when one dies
pools.py    which engines there are, from the settings
"""
