"""Speculative decoding: drafters on the host, and the depth of the drafts of each row.

    settings.py     the settings, from vLLM's `speculative_config`
    token_index.py  the earlier occurrences of the last tokens of a text
    drafters.py     n-gram, suffix and predicted output, behind one interface
    survival.py     the probability that a drafted token is accepted, from running counts
    depth.py        how many drafted tokens a step verifies, from their survival and the step's cost
    speculator.py   all of them together: the drafts of a step

A step verifies the drafts: it samples a token after each drafted token as if the draft were the
text, with the random numbers of that position, and keeps the drafts that are equal to the samples
(`exec/samples.py`). So the text does not depend on the drafts.
"""
