"""The plan of a run, from its configuration, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.capacity import timing
from clusterkit.capacity.sharing import Turn, computed_tokens
from clusterkit.common.text_plot import count, duration, gpus
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.metrics import History, number
from clusterkit.runs.trials import Trial, TrialState, run_directory
from trainer.config import RunConfig
from trainer.config_agents import (
    AgentConfig,
    ChunksAgentConfig,
    MemalphaAgentConfig,
    OverwritingAgentConfig,
    QuestionAgentConfig,
    SingleTurnConfig,
    StoresAgentConfig,
)
from trainer.config_parts import RAG_PARAGRAPHS
from trainer.config_tasks import (
    DocumentsConfig,
    FactsConfig,
    HotpotqaConfig,
    MemalphaConfig,
    RecallConfig,
    SectionsConfig,
)
from trainer.judge.servers import judge_urls, judges_folder
from trainer.sft.start import examples_path
from trainer.tasks.size import evaluated_tasks, evaluates, training_size

TEMPLATE_TOKENS = {"words": 12, "memagent": 220}
"""Tokens of a prompt's wording with its chat template, rounded up."""
FIRST_SHARE = 0.5
"""Of a wording and a question, whose tokens are rounded up: what stands before the memory where no section does."""
CHAT_TOKENS = 60
"""Tokens of a chat template around a prompt."""
TOKEN_CHARACTERS = 3
"""Characters of a token in a prompt's wording, fewer than English has."""
QUESTION_TOKENS = {"recall": 4, "hotpotqa": 30, "math": 120}
"""By task; for any other task, the longest question that is allowed."""
DOCUMENT_TOKENS = 150
"""Average tokens of a HotpotQA paragraph with its title."""
LATE_CHECKPOINT_HOURS = 2.0


def template_tokens(agent: AgentConfig) -> int:
    """Estimate the tokens of the longer one of the agent's two prompts before anything is filled in."""
    if not isinstance(agent, OverwritingAgentConfig) or not agent.wording:
        return TEMPLATE_TOKENS[agent.template]
    longest = max(len(agent.wording[name]) for name in ("update", "final"))
    return CHAT_TOKENS + -(-longest // TOKEN_CHARACTERS)


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest prompt with its response."""
    agent = config.agent
    if isinstance(agent, SingleTurnConfig):
        return agent.max_question_tokens + agent.max_final_tokens
    if isinstance(agent, MemalphaAgentConfig):
        return agent.context_tokens
    update = agent.question_limit("update") + agent.chunk_tokens + agent.max_memory_tokens
    final = agent.question_limit("final") + agent.max_final_tokens
    return template_tokens(agent) + agent.max_memory_tokens + max(update, final)


def largest_micro_batch(config: RunConfig) -> int:
    """Return the tokens of the largest micro-batch: train.max_tokens_per_mb, or one row that is longer."""
    packed = config.train.max_tokens_per_mb
    return packed if config.trainer.type == "sft" else max(packed, longest_sequence(config))


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run. Steps and tokens are estimates; `steps` is an upper bound if the data decides."""

    config: RunConfig
    trial: Trial

    @property
    def steps(self) -> int:
        """Training steps of the run."""
        return timing.total_steps(self.config)

    @property
    def trajectories_per_step(self) -> int:
        """Tasks of a step times the trajectories of each."""
        return self.config.rollout.batch_size * self.config.rollout.group_size

    @property
    def chunks(self) -> float:
        """Average number of chunks that a trajectory reads; 0 if unknown."""
        task = self.config.task
        if isinstance(task, DocumentsConfig):
            return self._read(documents=task.num_documents)
        return self._read((task.min_chunks + task.max_chunks) / 2) if isinstance(task, SectionsConfig) else 0.0

    def _read(self, chunks: float = 0.0, documents: int = 0) -> float:
        """Chunks that a trajectory reads of a text of so many, or of so many documents."""
        agent = self.config.agent
        if not isinstance(agent, ChunksAgentConfig):
            return 0.0
        chunks = chunks or -(-documents * DOCUMENT_TOKENS // agent.chunk_tokens)
        return min(chunks, agent.max_chunks) if agent.max_chunks else chunks

    @property
    def tokens_per_step(self) -> int:
        """Approximate prompt and response tokens of one step's rollout."""
        return round(self.trajectories_per_step * self._trajectory_tokens(self.chunks))

    def _trajectory_tokens(self, chunks: float, section: int = 0) -> float:
        """Tokens of a trajectory that reads so many chunks. section: tokens of each; 0: as the run reads."""
        task, agent = self.config.task, self.config.agent
        if not isinstance(agent, ChunksAgentConfig):
            return self._question_tokens + agent.max_final_tokens
        if isinstance(task, MemalphaConfig) and isinstance(agent, StoresAgentConfig):
            return agent.context_tokens
        chunk = task.section_tokens if isinstance(task, RecallConfig | FactsConfig) else agent.chunk_tokens
        fixed = template_tokens(agent) + self._question_tokens + agent.max_memory_tokens
        update = fixed + (section or min(chunk, agent.chunk_tokens)) + agent.max_memory_tokens
        if isinstance(agent, OverwritingAgentConfig) and agent.repeat_problem:
            update += self._question_tokens
        return chunks * update + fixed + agent.max_final_tokens

    @property
    def _evaluations(self) -> tuple[list[float], int]:
        """Tokens of a trajectory in each evaluation of the closing table, and the number of evaluations between steps.

        The table is that of trainer.evaluate, whose first line is sampled at the training temperature, too.
        """
        config = self.config
        if config.trainer.type != "grpo" or not evaluates(config):
            return [], 0
        table = [self.chunks] * (3 if config.eval.blank_memory and "agent.name" not in config.custom else 2)
        table += [self._read(n) for n in config.eval.final_chunks if "task.name" not in config.custom]
        table += [self._read(documents=n) for n in config.other_documents]
        between = (self.steps - 1) // config.eval.every_steps if config.eval.every_steps else 0
        return [*map(self._trajectory_tokens, table), *self._ways()], between

    def _ways(self) -> list[float]:
        """Tokens of a trajectory in each line of the closing table that reads otherwise than section after section."""
        config, task = self.config, self.config.task
        if not isinstance(task, HotpotqaConfig):
            return []
        found = self._trajectory_tokens(self._read(documents=RAG_PARAGRAPHS))  # the documents that answer are two, too
        window, answer = config.model.context_window, self._trajectory_tokens(0)

        def whole(documents: int) -> float:
            tokens = self._trajectory_tokens(1, documents * DOCUMENT_TOKENS)
            return min(tokens, window + answer) if window else tokens

        numbers = (task.num_documents, *config.other_documents)
        ways = config.eval.final_methods
        return [whole(n) if way == "long_context" else found for way in ways for n in numbers]

    @property
    def evaluation_trajectories(self) -> int:
        """Held-out trajectories of the whole run, at most (see `evaluated_tasks`)."""
        table, between = self._evaluations
        return evaluated_tasks(self.config).tasks * (2 * len(table) + between)

    @property
    def evaluation_tokens(self) -> int:
        """Approximate prompt and response tokens of the held-out trajectories of the whole run."""
        table, between = self._evaluations
        tokens = 2 * sum(table) + between * self._trajectory_tokens(self.chunks)
        return round(evaluated_tasks(self.config).tasks * tokens)

    @property
    def evaluation_steps(self) -> str:
        """How many steps sample as much as all held-out evaluations of the run; empty where there are none."""
        if not self.evaluation_trajectories:
            return ""
        steps = self.evaluation_tokens / self.tokens_per_step
        if self.config.custom:  # whose lengths nobody knows
            steps = self.evaluation_trajectories / self.trajectories_per_step
        return f"as much as {steps:,.{int(steps < 10)}f} steps sample"

    @property
    def computed_tokens_per_step(self) -> int:
        """Approximate tokens that training computes: what the rows of a group begin with alike counts once.

        The prompts of a first turn are equal. Those of later turns share the section where it stands before the memory.
        """
        agent = self.config.agent
        if self.config.trainer.type != "grpo":
            return self.tokens_per_step
        turns = self.turns(1.0)
        tokens = computed_tokens(self.config, turns)
        read = 1.0  # of the turns that share: so many sections are read on average, and these are whole turns
        if isinstance(agent, OverwritingAgentConfig) and turns:
            read = self.chunks / (len(turns) - 1) if agent.shares_sections else min(1.0, self.chunks)
        return round(self.tokens_per_step - read * (tokens.whole - tokens.computed))

    def turns(self, share: float) -> list[Turn]:
        """Return the turns of a trajectory whose responses are `share` of their limit long; none where texts decide."""
        agent, task = self.config.agent, self.config.task
        if isinstance(agent, SingleTurnConfig):
            return [Turn(self._question_tokens, self._question_tokens, share * agent.max_final_tokens)]
        if not isinstance(agent, OverwritingAgentConfig) or not self.chunks:
            return []
        fixed, memory = template_tokens(agent) + self._question_tokens, share * agent.max_memory_tokens
        section = task.section_tokens if isinstance(task, RecallConfig | FactsConfig) else agent.chunk_tokens
        read, before = fixed + min(section, agent.chunk_tokens), FIRST_SHARE * fixed
        updates = [
            Turn(read + memory, read if agent.shares_sections or not turn else before, memory)
            for turn in range(max(1, round(self.chunks)))
        ]
        return [*updates, Turn(fixed + memory, before, share * agent.max_final_tokens)]

    @property
    def _question_tokens(self) -> int:
        agent = self.config.agent
        longest = agent.max_question_tokens if isinstance(agent, QuestionAgentConfig) else 0
        return QUESTION_TOKENS.get(self.config.task.name, longest)

    @property
    def step_time(self) -> float | None:
        """Seconds of a step, from an earlier attempt of the same run."""
        return self.trial.history.step_time()

    @property
    def first_save(self) -> str:
        """When the first persistent checkpoint is written."""
        step = timing.save_interval(self.config)
        if self.config.checkpoint.save_freq_secs:
            return f"after {duration(self.config.checkpoint.save_freq_secs)}, at the latest after step {step}"
        return f"after step {step}{self._seconds_away(step)}"

    @property
    def summary(self) -> str:
        """Which run it is and where it begins, in one sentence."""
        return f"{self.trial.run.name} {self._beginning()}"

    @property
    def warnings(self) -> list[str]:
        """Warnings to show before the run starts."""
        step, seconds = timing.save_interval(self.config), self.config.checkpoint.save_freq_secs
        away = (step - self.trial.resume_step) * self.step_time if self.step_time else None
        if seconds and away:
            away = min(away, seconds)
        if away and not self.trial.history.saves and away > LATE_CHECKPOINT_HOURS * 3600:
            return [
                f"the first persistent checkpoint is about {duration(away)} away: "
                "set checkpoint.save_freq_steps or checkpoint.save_freq_secs to have one earlier"
            ]
        return []

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        run = self.trial.run
        return {
            "run": run.name,
            "course": self.trial.state.value,
            "resume_step": self.trial.resume_step,
            "busy": holder_of(run),
            "steps": self.steps,
            "ranks": self.config.ranks,
            "gpus": self.config.gpus,
            "trajectories_per_step": self.trajectories_per_step,
            "tokens_per_step": self.tokens_per_step,
            "computed_tokens_per_step": self.computed_tokens_per_step,
            "evaluation_trajectories": self.evaluation_trajectories,
            "evaluation_tokens": self.evaluation_tokens,
            "step_time_s": self.step_time,
            "warmup_steps": self._warmup_steps(),
            "first_recover_step": self._first_recover_step(),
            "first_save_step": timing.save_interval(self.config),
            "logs": str(run.logs),
            "checkpoints": str(run.checkpoints),
            "recover": str(run.recover),
            "warnings": self.warnings,
        }

    def lines(self) -> list[str]:
        """Return the plan as text."""
        config, run = self.config, self.trial.run
        if config.trainer.type == "null":
            return self._rollout_lines()
        bound = "" if config.train.total_steps or training_size(config).exact else "at most "
        rows = [
            ("run", self.summary),
            ("ranks", self._ranks()),
            ("steps", f"{bound}{self.steps}{self._whole_time()}"),
            ("one step", self._one_step()),
            ("warm-up", self._warmup()),
            *self._supervised(),
            ("evaluation", self._evaluation()),
            *self._judge(),
            (
                "recover",
                f"first after step {self._first_recover_step()}, then every "
                f"{duration(config.checkpoint.ckpt_freq_secs)} when a step ends; {run.recover}",
            ),
            ("checkpoint", f"first {self.first_save}; {run.checkpoints}"),
            ("logs", str(run.logs)),
        ]
        rows += [("warning", warning) for warning in self.warnings]
        return [f"{label:<11} {text}" for label, text in rows]

    def remote_lines(self, place: str) -> list[str]:
        """Return the plan as text for a run on other machines; `place` names them, such as a cluster."""
        kept = [line for line in self.lines() if line.split(maxsplit=1)[0] not in ("run", "recover", "logs", "judge")]
        experiment = self.config.experiment_name
        return [f"{'run':<11} {experiment} {place}: a new trial, or the unfinished one of the same settings", *kept]

    def _ranks(self) -> str:
        """Return the processes that train, and the GPUs of both sides."""
        config, allocation = self.config, self.config.allocation
        if allocation is None:
            return str(config.ranks)
        made = allocation.rollout_gpus
        sides = [f"{gpus(made)} {'generates' if made == 1 else 'generate'}"] if made else []
        shared = "on the same ones" if config.rollout.max_staleness else "in turns on the same ones"
        sides += [shared] if allocation.colocated and sides else []
        train = "trains" if config.ranks == 1 else "train"
        return ", ".join([f"{config.ranks} {train} on {config.n_nodes} x {gpus(config.n_gpus_per_node)}", *sides])

    def _rollout_lines(self) -> list[str]:
        """Return the plan as text for trainer.type=null."""
        config, run = self.config, self.trial.run
        tasks = evaluated_tasks(config).tasks
        rows = [
            ("run", self.summary),
            ("tasks", f"at most {tasks} of {config.eval.split}, in {self.steps} steps; nothing is learned"),
            ("one step", self._one_step()),
            ("warm-up", self._warmup()),
            ("logs", f"{run.logs}, trajectories in rollouts/"),
        ]
        return [f"{label:<11} {text}" for label, text in rows]

    def _beginning(self) -> str:
        busy = holder_of(self.trial.run)
        if busy:
            return f"is being trained now by {busy}"
        if self.trial.state is TrialState.COMPLETE:
            return "is complete already, nothing would be trained"
        if self.trial.state is TrialState.NEW and self.config.recover_from:
            return f"starts from {self.config.recover_from}"
        if self.trial.state is TrialState.NEW:
            start = "goes on with its supervised start, if that has these settings and data"
            anew = f"starts from the beginning; {self.trial.complete} is complete" if self.trial.complete else ""
            return start if self._keeps_supervised else anew or "starts from the beginning"
        if self.trial.resume_step:
            return f"goes on after step {self.trial.resume_step}"
        gone = self.trial.history.recovers and self.config.recover_mode != "disabled"
        told = "with its supervised checkpoint" if self._keeps_supervised else "so from the beginning"
        refusal = "is refused: its recover checkpoints have gone (`clusterkit recover check` says more)"
        return refusal if gone else f"goes on; there is no recover checkpoint, {told}"

    @property
    def _keeps_supervised(self) -> bool:
        config = self.config
        return bool(config.supervised.dataset) and config.recover_mode != "disabled" and self.trial.run.keeps_supervised

    def _one_step(self) -> str:
        rollout = self.config.rollout
        if self.config.trainer.type == "sft":
            return f"{rollout.batch_size} examples of {self.config.data_path or 'task.path'}"
        if self.config.custom:
            made = self.trajectories_per_step
            return f"{rollout.batch_size} tasks x {rollout.group_size} = {made} trajectories of your own classes"
        each = f"of about {self.chunks:g} chunks, about" if self.chunks else "of one response, at most"
        if self.config.task.name == "memalpha":
            each = "and, for one chunk of each, at most"
        return (
            f"{rollout.batch_size} tasks x {rollout.group_size} = {self.trajectories_per_step} trajectories {each} "
            f"{count(self.tokens_per_step)} tokens{self._shared()}"
        )

    def _shared(self) -> str:
        computed = self.computed_tokens_per_step
        if computed >= self.tokens_per_step:
            return ""
        return f", of which training computes {count(computed)}: shared prefixes once"

    def _warmup_steps(self) -> int:
        # A pretrained model is not warmed up, nor is one that learns from examples.
        if self.config.model.path or self.config.trainer.type == "sft":
            return 0
        return self.config.warmup.recall_steps + self.config.warmup.steps

    def _warmup(self) -> str:
        if not self._warmup_steps():
            return "none"
        warmup = self.config.warmup
        return (
            f"at most {warmup.recall_steps} steps of recall and {warmup.steps} of demonstrations, "
            f"{warmup.batch_size} sequences each; read from the cache when these settings have been warmed up before"
        )

    def _supervised(self) -> list[tuple[str, str]]:
        """Return the supervised start, if there is one."""
        s = self.config.supervised
        if not s.dataset:
            return []
        many = f"{s.total_steps} steps" if s.total_steps else f"{s.total_epochs} epochs"
        path = examples_path(self.config)
        return [("start", f"supervised, {many} of {path} in batches of {s.batch_size}; done once a run")]

    def _evaluation(self) -> str:
        settings, lengths = self.config.eval, self.config.task.name == "recall"
        if not evaluates(self.config):
            return "none: every row is trained on (task.eval_fraction=0); clusterkit eval scores the checkpoints"
        often = f", every {settings.every_steps} steps" if settings.every_steps else ""
        table = f"; closing table at {settings.final_chunks} chunks" if settings.final_chunks and lengths else ""
        if settings.final_documents:
            table = f"; closing table at {settings.final_documents} documents"
        if settings.final_methods:
            table += f"{',' if table else '; closing table'} with {', '.join(settings.final_methods)}"
        held = evaluated_tasks(self.config)
        if not held.tasks:
            return f"none: no task is held out for eval.split={settings.split}"
        bound = "" if held.exact else "at most "
        told = f"{bound}{held.tasks} held-out task{'s' * (held.tasks != 1)} before, after{often}{table}"
        if not self.evaluation_trajectories:
            return told
        return f"{told}; in all {self.evaluation_trajectories} trajectories, {self.evaluation_steps}"

    def _judge(self) -> list[tuple[str, str]]:
        """Return the server that reads and judges, if there is one."""
        config, judge = self.config, self.config.judge
        if config.reward.name != "memalpha" or judge.reader == "rules":
            return []
        run = self.trial.run
        urls = judge.url or ", ".join(judge_urls(judges_folder(run.fileroot, run.user, run.experiment, run.trial)))
        name = judge.model or "any model"
        if urls:
            return [("judge", f"{name} at {urls}")]
        start = f"clusterkit serve judge {run.name}"
        return [("judge", f"{name}; none is registered yet: {start} --model-path {judge.model or 'MODEL'}")]

    def _first_recover_step(self) -> int:
        settings = self.config.checkpoint
        return min(filter(None, (settings.ckpt_first_step, settings.ckpt_freq_steps)))

    def _whole_time(self) -> str:
        if self.step_time is None:
            return ""
        each = self.trial.history.step_time(evaluations=False) or 0.0
        left = max(self.steps - self.trial.resume_step, 0) * each
        evaluations = self._evaluation_seconds()
        told = f", {duration(self.step_time)} each so far: about {duration(left + (evaluations or 0.0))} to go"
        if evaluations is None:
            return f"{told}, evaluations apart" if self.evaluation_trajectories else told
        return f"{told}, evaluations included" if evaluations else told

    def _evaluation_seconds(self) -> float | None:
        """Seconds of the evaluations to come, by those on record; None where there is none on record.

        The closing table takes as long as it took before the first step.
        """
        records, every = self.trial.history.evals, self.config.eval.every_steps
        table = [number(one, "seconds") or 0.0 for one in records if one.get("name") == "before"]
        heldout = [number(one, "seconds") or 0.0 for one in records if one.get("name") == "heldout"]
        if not table:
            return None
        if self.trial.state is TrialState.COMPLETE:
            return 0.0
        # The first line of the table is that evaluation, greedy and sampled.
        each = sum(heldout) / len(heldout) if heldout else table[0] / 2
        between = max((self.steps - 1) // every - self.trial.resume_step // every, 0) if every else 0
        return sum(table) + between * each

    def _seconds_away(self, step: int) -> str:
        if self.step_time is None:
            return ""
        return f", in about {duration(max(step - self.trial.resume_step, 0) * self.step_time)}"


def remote_plan(config: RunConfig) -> RunPlan:
    """Return the plan of a run on other machines, whose trial is unknown here."""
    return RunPlan(config, Trial(run_directory(config, config.trial_name), TrialState.NEW, History()))
