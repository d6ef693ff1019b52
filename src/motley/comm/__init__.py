"""Sums over ranks: collectives, and the wire modes of ``--wire``, which sum gradients."""
