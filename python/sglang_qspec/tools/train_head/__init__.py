"""`qspec models train-head`: trains a head for a target, on texts that the target writes."""
