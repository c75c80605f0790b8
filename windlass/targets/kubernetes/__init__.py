"""Kubernetes: any cluster of a kubeconfig, EKS and HyperPod among them."""
