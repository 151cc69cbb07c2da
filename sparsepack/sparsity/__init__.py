"""From the statistics of a calibration to thresholds: which channels a decoded token may skip at each site."""
