#!/usr/bin/env bash
# Refuses files that hold what looks like a key: W&B (40 hex digits beside a telling word), Hugging Face, private keys.
set -u
found=0
for file in "$@"; do
  if grep -nIE '(wandb|api[_-]?key|token|secret)[^[:space:]]{0,20}["'"'"'=: ]+[0-9a-f]{40}\b|hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----' "$file" >/dev/null; then
    printf '%s holds what looks like a key\n' "$file" >&2
    found=1
  fi
done
exit $found
