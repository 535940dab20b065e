"""Verdicts on all hosts together: their number, clocks, names and whether their GPUs are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.checks.gpu import describe
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.facts.model import Facts

SKEW_WARN = 5.0
SKEW_FAIL = 30.0


def judge_cluster(facts: Mapping[str, Facts], needs: Needs) -> Iterator[Finding]:
    """Yield the verdicts on the hosts that answered, as a group."""
    yield from _enough(facts, needs)
    yield from _clocks(facts)
    yield from _names(facts)
    yield from _same_gpus(facts)


def _enough(facts: Mapping[str, Facts], needs: Needs) -> Iterator[Finding]:
    if needs.preset and len(facts) < needs.hosts:
        message = f"preset {needs.preset} needs {needs.hosts} hosts; {len(facts)} can be worked with"
        fix = "Name more hosts, repair those that cannot be reached, or use a smaller preset (clusterkit presets)."
        yield Finding("", "hosts", Level.FAIL, message, fix)


def _clocks(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    offsets = {name: fact.clock_offset for name, fact in facts.items() if fact.clock}
    # With an even number of hosts our own clock counts too: of two hosts it shows which one is wrong.
    own = [0.0] if len(offsets) % 2 == 0 else []
    middle = median([*offsets.values(), *own]) if offsets else 0.0
    for name, offset in offsets.items():
        skew = offset - middle
        certain = abs(skew) - facts[name].clock_error
        level = Level.FAIL if certain > SKEW_FAIL else Level.WARN if certain > SKEW_WARN else Level.OK
        if level is Level.OK:
            yield Finding(name, "clock", level, f"clock within {max(abs(skew), 0.1):.1f} s of the others")
            continue
        message = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the others'"
        fix = "Let it keep time: `timedatectl set-ntp true`, or chrony (`chronyc makestep` sets it at once)."
        yield Finding(name, "clock", level, message, fix)


def _names(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    hostnames = Counter(fact.hostname for fact in facts.values() if fact.hostname)
    machines = Counter(fact.machine_id for fact in facts.values() if fact.machine_id)
    for name, fact in facts.items():
        others = {other: theirs for other, theirs in facts.items() if other != name}
        same_name = [other for other, theirs in others.items() if fact.hostname == theirs.hostname != ""]
        same_id = [other for other, theirs in others.items() if fact.machine_id == theirs.machine_id != ""]
        both = [other for other in same_name if other in same_id]
        if both:
            message = f"has the hostname and the machine-id of {', '.join(both)}: one machine under two names?"
            yield Finding(name, "identity", Level.FAIL, message, "Name every machine once.")
        elif same_name:
            message = f"has the same hostname as {', '.join(same_name)}: {fact.hostname}"
            yield Finding(name, "identity", Level.FAIL, message, "Give it its own: `hostnamectl set-hostname NAME`.")
        elif same_id:
            message = f"has the same machine-id as {', '.join(same_id)}: cloned from one image"
            fix = "`rm /etc/machine-id && systemd-machine-id-setup`, then reboot."
            yield Finding(name, "identity", Level.WARN, message, fix)
        elif hostnames or machines:
            yield Finding(name, "identity", Level.OK, f"hostname {fact.hostname}")


def _same_gpus(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    kinds = {name: describe(fact) for name, fact in facts.items()}
    drivers = {name: fact.gpus[0].driver for name, fact in facts.items() if fact.gpus}
    for check, seen, what in (("gpus", kinds, ""), ("driver", drivers, "driver ")):
        counts = Counter(seen.values())
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        for name, kind in seen.items():
            if kind != usual:
                message = f"differs from the other hosts: {what}{kind}, they have {what}{usual}"
                yield Finding(name, check, Level.WARN, message, "Use hosts alike, or leave this one out (--exclude).")
