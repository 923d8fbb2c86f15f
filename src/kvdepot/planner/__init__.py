"""Capacity, retention, drive mix, cost and power, from a model's config and a workload."""
