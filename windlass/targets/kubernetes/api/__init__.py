"""Talk to a cluster: HTTP, kubeconfig, credentials, what it serves, and what its refusals mean."""
