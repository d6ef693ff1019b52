"""Sums over ranks: collectives, and the modes of ``--wire``, which sum gradients."""
