"""The command line: one file a command, with its options and its --help; `actions` holds what each does.

`main` imports a command's file when the command is typed, and that file imports its action when the options are read:
`--help` costs no import beyond Typer's.
"""
