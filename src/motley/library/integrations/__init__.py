"""Adapters that let scripts for transformers, Accelerate and Lightning train on all ranks.

Each module imports its framework, and ``motley`` imports none of these modules by itself.
"""
