"""Thin bridges from other training frameworks to the lab: transformers, Accelerate, Lightning.

Each module imports its framework, and ``motley`` imports none of these modules by itself.
"""
