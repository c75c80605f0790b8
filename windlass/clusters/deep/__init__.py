"""A check that runs pods: names, links, collectives and disks, tried from inside the cluster with a run's own pods."""
