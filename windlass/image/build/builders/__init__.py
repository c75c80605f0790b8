"""The tools that build and run images: docker buildx, podman, buildah. One file each; `finding` chooses."""
