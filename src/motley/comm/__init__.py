"""The sum of values over ranks: collectives, and the modes of ``--wire``."""
