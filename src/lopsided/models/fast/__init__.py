"""Exact fast paths: small maps, the optimizer's memory order."""
