"""How ranks add up what they have: collectives, and the ways of ``--wire``."""
