"""Adapters with which all ranks train scripts of transformers, Accelerate and Lightning.

Each module imports its framework, and ``motley`` imports none of these modules by itself.
"""
