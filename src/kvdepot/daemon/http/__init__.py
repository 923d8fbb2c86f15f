"""The daemon over HTTP: metrics, health, an API for operators, and the dashboard."""
