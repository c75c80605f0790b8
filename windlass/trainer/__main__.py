"""`python -m windlass.trainer`, under torchrun."""

import gc

from windlass.trainer.callbacks.preemption import Preemption

if __name__ == "__main__":
    preemption = Preemption()
    preemption.listen()  # before torch is imported: that takes seconds, in which a SIGTERM must not be lost
    gc.disable()  # imports leave no garbage, and looking for it takes an eighth of their time; see train_in
    from windlass.trainer.main import run_and_exit

    run_and_exit(preemption)
