"""Choose what an image is made of, and write its Dockerfile."""
