"""`python -m adapterswap` is the command line."""

from adapterswap.cli import main

if __name__ == "__main__":
    main()
