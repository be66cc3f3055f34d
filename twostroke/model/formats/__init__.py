"""Weight formats of the torch backends: packing, linears, calibration, choice of a format."""
