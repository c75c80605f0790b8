"""What the commands do, as Python functions: `import windlass` offers them. They return the models of `--json`."""
