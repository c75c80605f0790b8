"""Commands on a cluster's pods: exec, debug, sync, top."""
