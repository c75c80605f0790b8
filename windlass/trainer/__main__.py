"""`python -m windlass.trainer`, under torchrun."""

from windlass.trainer.main import run_and_exit

if __name__ == "__main__":
    run_and_exit()
