"""What a run leaves to continue from, and how it gets there and back."""
