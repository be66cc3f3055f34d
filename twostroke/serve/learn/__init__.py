"""The page `/learn`: its data, experiments and export."""
