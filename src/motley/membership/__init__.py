"""The members of a job: which ranks live, how the loss of a rank is handled, how hosts return."""
