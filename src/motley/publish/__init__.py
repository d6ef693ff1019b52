"""The publication of a run's records to a tracker."""
