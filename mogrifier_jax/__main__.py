"""`python -m mogrifier_jax` is the command `mogrifier`."""

from mogrifier_jax import main

if __name__ == "__main__":
    main.run()
