"""What this machine can run, what is wrong with it, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, Literal

from clusterkit.backends.local.interpreter import FOLDER
from clusterkit.capacity.machine import ENGINES, Interpreter, Machine, look
from clusterkit.capacity.memory import GIB
from clusterkit.capacity.preset_plan import plan_preset
from clusterkit.capacity.runnable import require_engine, require_inputs, require_runnable
from clusterkit.common.finding import Finding, Level
from clusterkit.common.text_plot import gpus
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from clusterkit.data.assets import list_assets
from clusterkit.provision.checks.gpu import describe, judge_hardware
from clusterkit.provision.checks.needs import Needs
from trainer.assets import cache_root
from trainer.config import RunConfig
from trainer.errors import UserError

LEAST_FREE = 2 * GIB
LEAST_CAPABILITY = 8
"""First number of the compute capability that SGLang's kernels are built for."""
_TRAINER = ("torch", "transformers")


@dataclass(frozen=True)
class Verdict:
    """Whether a preset can be trained on this machine."""

    preset: str
    state: Literal["ready", "wants", "no"]  # ready; wants something first (`why`); or no, for the reason `why`
    why: str
    command: str  # that trains it; empty for no


@dataclass(frozen=True)
class Next:
    """A command and what it is for."""

    purpose: str
    command: str


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    machine: Machine
    fileroot: Path
    cache: Path
    assets: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def can_run(self) -> bool:
        """Whether any preset can be trained here, if something is fetched first."""
        return any(one.state != "no" for one in self.verdicts)

    @property
    def next(self) -> list[Next]:
        """What to type next, the likeliest first."""
        found = []
        has_gpus = bool(self.machine.facts.gpus)
        if has_gpus and not any(_engines(python) for python in self.machine.pythons):
            found.append(Next("install SGLang", "make gpu"))
        if not any(_has(python, _TRAINER) for python in self.machine.pythons):
            found.append(Next("install PyTorch", "make setup"))
        by_name = {one.preset: one for one in self.verdicts if one.state == "ready"}
        wanting = {one.preset: one for one in self.verdicts if one.state == "wants"}
        first = next((by_name[name] for name in ("135M", "tiny") if name in by_name), None)
        if "135M" in wanting and has_gpus:
            found.append(Next("fetch a model", "clusterkit assets get smollm2-135m"))
            found.append(Next("train it here", wanting["135M"].command))
        elif first or by_name:
            found.append(Next("train here", (first or next(iter(by_name.values()))).command))
        found.append(Next("other hosts", "clusterkit check --hostnames HOST…"))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        machine = self.machine
        gpus = zip(machine.facts.gpus, [*machine.capabilities, *[""] * len(machine.facts.gpus)], strict=False)
        return {
            "system": machine.system,
            "cores": machine.cores,
            "memory_bytes": machine.memory,
            "gpus": [
                {"index": gpu.index, "name": gpu.name, "memory_bytes": gpu.memory, "compute_capability": capability}
                for gpu, capability in gpus
            ],
            "driver": machine.facts.gpus[0].driver if machine.facts.gpus else machine.facts.driver_module,
            "cuda": machine.cuda,
            "pythons": [asdict(python) for python in machine.pythons],
            "fileroot": str(self.fileroot),
            "cache": str(self.cache),
            "free_bytes": machine.disks,
            "assets": {one["name"]: one["present"] for one in self.assets},
            "findings": [finding.as_dict() for finding in self.findings],
            "presets": [asdict(verdict) for verdict in self.verdicts],
            "can_run": self.can_run,
            "next": [asdict(step) for step in self.next],
        }


def diagnose(fileroot: Path, cache_dir: str = "") -> Diagnosis:
    """Look at this machine. fileroot: folder of runs. cache_dir: of assets; empty: the usual one."""
    cache = cache_root(cache_dir)
    machine = look(fileroot, cache)
    return Diagnosis(
        machine=machine,
        fileroot=fileroot,
        cache=cache,
        assets=tuple(list_assets(cache_dir)),
        findings=tuple(_findings(machine)),
        verdicts=tuple(_verdict(name, machine, cache_dir) for name in presets.size_names()),
    )


def _findings(machine: Machine) -> Iterator[Finding]:
    """What is wrong."""
    for finding in judge_hardware("", machine.facts, Needs()):
        if finding.level is not Level.OK:
            yield finding
    for gpu, capability in zip(machine.facts.gpus, machine.capabilities, strict=False):
        if capability.partition(".")[0].isdigit() and int(capability.partition(".")[0]) < LEAST_CAPABILITY:
            message = f"GPU {gpu.index} has compute capability {capability}; SGLang's kernels need {LEAST_CAPABILITY}.0"
            yield Finding("", "gpus", Level.WARN, message, "Hide it with CUDA_VISIBLE_DEVICES, or train without GPUs.")
    for python in machine.pythons:
        if python.error:
            yield Finding("", "python", Level.FAIL, f"{python.path} does not run: {python.error}", "make gpu mends it.")
        elif machine.facts.gpus and _engines(python) and not python.cuda:
            message = f"{python.path} has {_engines(python)[0]}, but a PyTorch without CUDA"
            yield Finding("", "python", Level.WARN, message, f"make gpu makes {FOLDER}, whose packages fit together.")
    for folder, free in machine.disks.items():
        if free < LEAST_FREE:
            fix = "Make room, or choose another with --fileroot or $CLUSTERKIT_CACHE."
            yield Finding("", "disk", Level.WARN, f"{free / GIB:.1f} GiB free at {folder}", fix)


def _verdict(name: str, machine: Machine, cache_dir: str) -> Verdict:
    size = presets.load_size(name)
    try:
        config, command = _fitted(name, machine)
        config = config.model_copy(update={"cache_dir": cache_dir or config.cache_dir})
        require_runnable(config)
        _require_packages(config, machine)
    except UserError as error:
        return Verdict(name, "no", _first_sentence(error), "")
    try:
        require_inputs(config)
    except UserError as error:
        return Verdict(name, "wants", _first_sentence(error), command)
    return Verdict(name, "ready", size.description.strip().partition(". ")[0].rstrip("."), command)


def _fitted(name: str, machine: Machine) -> tuple[RunConfig, str]:
    """The preset's configuration on the GPUs of this machine, and the command that trains it."""
    config, here = resolve(name).config, machine.facts.gpus
    if config.n_nodes > 1:
        raise UserError(f"takes {config.n_nodes} hosts of {gpus(config.n_gpus_per_node)}")
    if not config.gpus:
        return config, f"clusterkit train --preset {name}"
    takes = f"takes {gpus(config.gpus)}; {len(here) or 'none'} here"
    if not here:
        raise UserError(takes)
    # What nvidia-smi reports has a fraction, by which the arithmetic tells it from a size as sold.
    memory = min(gpu.memory for gpu in here) / GIB
    try:
        plan = plan_preset(name, nodes=1, gpus_per_node=min(config.gpus, len(here)), gpu_memory_gib=memory + 1e-6)
    except UserError as error:
        raise UserError(f"{takes}, and it cannot be fitted: {_first_sentence(error)}") from error
    if not plan.fits:
        why = next(finding.message for finding in plan.findings if finding.level is Level.FAIL)
        raise UserError(f"{takes}, of {memory:.0f} GiB, where it does not fit: {why}")
    return plan.config, plan.command


def _require_packages(config: RunConfig, machine: Machine) -> None:
    """Raise UserError where the Python that would train lacks something."""
    python = machine.pythons[0]
    if config.gpus:
        python = next((one for one in machine.pythons if one.path == machine.gpu_python), python)
    if not _has(python, _TRAINER):
        raise UserError(f"{python.path} lacks PyTorch or transformers: {'make gpu' if config.gpus else 'make setup'}")
    if config.gpus and not python.cuda:
        raise UserError(f"PyTorch of {python.path} is built without CUDA: make gpu")
    require_engine(config, python.path)


def _has(python: Interpreter, names: tuple[str, ...]) -> bool:
    return all(name in (python.packages or {}) for name in names)


def _engines(python: Interpreter) -> list[str]:
    return [f"{name} {version}" for name, version in (python.packages or {}).items() if name in ENGINES]


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0]


def lines_of(found: Diagnosis) -> list[str]:
    """Return the diagnosis as text for people."""
    machine = found.machine
    present = describe(machine.facts)
    if machine.facts.gpus:
        present += f", driver {machine.facts.gpus[0].driver}" + (f", CUDA {machine.cuda}" if machine.cuda else "")
    rows = [("machine", f"{machine.system}, {machine.cores} cores, {machine.memory / GIB:.0f} GiB of memory")]
    rows += [("GPUs", present)]
    for number, python in enumerate(machine.pythons):
        rows += [("" if number else "Python", _python_line(python, "this command's" if not number else ""))]
    rows += [("disk", f"{free / GIB:.0f} GiB free at {folder}") for folder, free in machine.disks.items()]
    cached = [one["name"] for one in found.assets if one["present"]]
    rows += [("cache", ", ".join(cached) or "empty (clusterkit assets list)")]
    lines = [line for name, text in rows for line in _wrapped(f"{name:<9}", text)]
    for finding in found.findings:
        mark = {Level.FAIL: "FAIL", Level.WARN: "warn"}[finding.level]
        lines += [*_wrapped(f"{mark:<9}", finding.message), *_wrapped(f"{'':<9}", f"-> {finding.fix}")]
    titles = {"ready": "Can be trained here", "wants": "Want something first", "no": "Not here"}
    width = max(len(one.preset) for one in found.verdicts)
    for state, title in titles.items():
        chosen = [one for one in found.verdicts if one.state == state]
        lines += ["", title] if chosen else []
        for one in chosen:
            lines += _wrapped(f"  {one.preset:<{width}}  ", one.why)
            if one.command not in ("", f"clusterkit train --preset {one.preset}"):
                lines += _wrapped(f"  {'':<{width}}  ", f"-> {one.command}")
    steps = found.next
    wide = max(len(step.purpose) for step in steps)
    return [*lines, "", "Next", *(f"  {step.purpose:<{wide}}  {step.command}" for step in steps)]


def _wrapped(start: str, text: str) -> list[str]:
    columns = max(40, min(get_terminal_size().columns, 120) - 1)
    return wrap(
        text, columns, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _python_line(python: Interpreter, note: str) -> str:
    if python.error:
        return f"{python.path}: does not run ({python.error})"
    packages = dict(python.packages or {})
    torch = packages.pop("torch", "")
    parts = [f"PyTorch {torch} ({f'CUDA {python.cuda}' if python.cuda else 'no CUDA'})"] if torch else ["no PyTorch"]
    parts += _engines(python) or ["no engine"]
    return f"{python.version} {python.path}{f' ({note})' if note else ''}: {', '.join(parts)}"
