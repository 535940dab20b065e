"""What tests ask of the plan of a preset."""

from __future__ import annotations

from clusterkit.capacity.preset_plan import PresetPlan
from clusterkit.common.finding import Level


def level_of(plan: PresetPlan, check: str) -> list[Level]:
    return [finding.level for finding in plan.findings if finding.check == check]


def message_of(plan: PresetPlan, check: str) -> str:
    return "\n".join(f"{f.message} {f.fix}" for f in plan.findings if f.check == check)
