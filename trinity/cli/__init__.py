"""The command line: arguments in, launcher called, exit code out. A module a command."""
