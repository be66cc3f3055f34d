"""Tiers: KV blocks of prefixes below the device's pool, in host memory and in a folder on a disk.

    device pool ──store──▶ host memory, disk        behind the step that computed the blocks
    device pool ◀──fetch── host memory, disk        into blocks of a request that waits for them

`tiers.py` and `index.py` are bookkeeping without tensors, files and clocks. `host.py` and `disk.py`
copy bytes in their own threads and report finished copies.
"""
