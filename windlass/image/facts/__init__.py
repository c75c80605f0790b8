"""What is known of torch releases, base images, GPUs and drivers: tables with sources, and their lookup."""
