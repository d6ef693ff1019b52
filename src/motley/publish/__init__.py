"""The publication of a run's records to an experiment tracker, such as MLflow."""
