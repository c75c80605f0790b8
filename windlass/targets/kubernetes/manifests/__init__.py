"""A run as Kubernetes objects. Pure, apart from `code.gather`, which reads beforehand what goes with the job."""
