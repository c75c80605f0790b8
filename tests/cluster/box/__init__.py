"""A real Kubernetes cluster on this machine: control plane, three nodes, DNS, operators."""
