"""Speculative decoding: drafters on the host, and the depth of the drafts of each row.

    speculation_config.py  the settings, from vLLM's `speculative_config`
    interface.py           the interface of drafters and draft models
    token_index.py         finds earlier occurrences of the last tokens of a text
    drafters.py            drafters that search texts: n-gram, suffix and predicted output
    survival.py            the probability that a drafted token is accepted, from running counts
    depth.py               the number of drafted tokens that a step verifies
    model_choice.py        the rows for which the draft model runs
    speculator.py          combines these: the drafts of a step

A step verifies the drafts: it samples a token after each drafted token as if the draft were the
text, with the random numbers of that position, and keeps the drafts that are equal to the samples
(`exec/samples.py`). So the text does not depend on the drafts.
"""
