"""The command line: one file per command, with its options; `work` holds what each does. No logic in either.

`main` imports a command's file when the command is typed, and that file imports its work when the options are read:
`--help` costs no import beyond Typer's.
"""
