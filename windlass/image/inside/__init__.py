"""Run inside an image to prove it. Standard library only: the image may hold no windlass. `testing` carries it in."""
