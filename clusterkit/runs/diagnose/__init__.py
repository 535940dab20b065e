"""Why a run failed or stands still: known signs in its logs and numbers -> cause -> the setting to change.

signatures/ what messages mean, as data; scan.py finds them and phases.py says in which phase; checks.py judges numbers;
changes.py turns a rule into a present and a proposed value; applied.py keeps what was applied beside the run.
"""
