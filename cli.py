"""Run the command line from a checkout: `python cli.py compose …` is `adapterswap compose …`."""

from adapterswap.cli import main

if __name__ == "__main__":
    main()
