"""The torch decoder: attention, MLP and the forward over any `ModelSpec`."""
