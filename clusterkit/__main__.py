"""`python -m clusterkit` is the command `clusterkit`."""

from clusterkit.cli.main import main

if __name__ == "__main__":
    main()
