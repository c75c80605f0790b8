"""Registries: names, credentials, push, pins, overlays."""
