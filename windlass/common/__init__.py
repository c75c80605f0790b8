"""Small tools that every room may use: durable files, locks, retries, hub access, ports. Needs errors alone."""
