"""The command line: one file per command. Each parses, calls the package, prints; none holds logic."""
