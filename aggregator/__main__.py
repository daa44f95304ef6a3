"""`python -m aggregator`."""

from aggregator.cli import main

if __name__ == "__main__":
    main()
