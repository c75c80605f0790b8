"""`python -m windlass.trainer`, under torchrun."""

from windlass.trainer.callbacks.preemption import Preemption

if __name__ == "__main__":
    preemption = Preemption()
    preemption.listen()  # before torch is imported: that takes seconds, in which a SIGTERM must not be lost
    from windlass.trainer.main import run_and_exit

    run_and_exit(preemption)
