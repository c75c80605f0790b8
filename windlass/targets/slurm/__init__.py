"""The Slurm target: one readable sbatch script, and the verbs over Slurm's own commands, here or over SSH."""
