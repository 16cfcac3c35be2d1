"""The run folder: records, metrics, warnings, trackers, and resuming; no tensors."""
