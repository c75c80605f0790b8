"""What targets share: torchrun, what a death means, processes, logs, progress, disk space and this machine."""
