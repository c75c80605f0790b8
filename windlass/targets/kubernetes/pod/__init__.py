"""What runs inside a pod: it meets the others, starts torchrun, forwards logs, decides with them what a death means."""
