"""What happens between a micro-batch and a changed parameter, one file a strategy."""
