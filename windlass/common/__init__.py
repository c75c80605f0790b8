"""Small tools that every room may use: durable files, locks, retries, hub access, ports. Imports nothing of windlass
but its errors."""
