"""ECR and CodeBuild."""
