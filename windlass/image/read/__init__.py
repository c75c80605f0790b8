"""Read a Dockerfile, its shell commands and the files they name into steps. Pure."""
