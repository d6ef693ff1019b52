"""Thin bridges that let the lab train with transformers, Accelerate and Lightning.

Each module imports its framework, and ``motley`` imports none of these modules by itself.
"""
