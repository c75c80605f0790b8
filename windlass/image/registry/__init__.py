"""Registries: names, credentials, push, pins."""
