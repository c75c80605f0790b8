"""Build an image with docker, podman or buildah, and prove it."""
