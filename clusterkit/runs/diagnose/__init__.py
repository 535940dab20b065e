"""Why a run failed or stalled: known messages and numbers, their cause, and the setting to change.

signatures/ holds the messages as data, scan.py finds them in logs and phases.py finds the phase of the step. checks.py
judges numbers. changes.py makes proposals from rules, and applied.py keeps what was applied to a run.
"""
