"""The options of the training scripts, grouped and typed once."""
