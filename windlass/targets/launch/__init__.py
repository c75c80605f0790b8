"""What targets share: what a death means, processes, machines, files that grow."""
