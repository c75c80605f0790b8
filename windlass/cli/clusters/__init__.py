"""Commands on clusters and on their pods: cluster, exec, debug, sync, top."""
