"""Windlass for coding agents: the seeds' functions, an MCP server, skills; all of it through the commands' JSON."""

from windlass.agent.seeds import (
    build_docker_image,
    deploy_training_job,
    deploy_with_checkpoints,
    manage_eks_cluster,
    manage_pytorchjob,
    monitor_training,
    test_docker_image,
)

__all__ = [
    "build_docker_image",
    "deploy_training_job",
    "deploy_with_checkpoints",
    "manage_eks_cluster",
    "manage_pytorchjob",
    "monitor_training",
    "test_docker_image",
]
