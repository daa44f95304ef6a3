"""`python -m model_server` is `model-server`."""

from model_server.cli import main

if __name__ == "__main__":
    main()
