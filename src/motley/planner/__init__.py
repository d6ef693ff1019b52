"""Measures, forms the process group, and makes the plan with the arithmetic of motley.plan."""
