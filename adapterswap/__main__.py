"""Run the command line as `python -m adapterswap`."""

from adapterswap.cli import main

if __name__ == "__main__":
    main()
