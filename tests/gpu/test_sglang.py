"""The SGLang engine against real servers on one GPU, with SmolLM2-135M-Instruct.

    python3 -m pytest tests/gpu/test_sglang.py -m gpu

needs a CUDA device, SGLang and transformers in the same Python. The tests run in this order: the last ones kill the
servers. CLUSTERKIT_SGLANG_FLAGS adds options to the servers' command lines.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenversions import token_versions

from tests.realparts import require
from trainer.engines.base import EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import RefusedError, Server, ServerPool
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess, ServerStartError
from trainer.engines.served import ServedEngine
from trainer.engines.sglang_dialect import UNTOUCHED, SGLangDialect
from trainer.judge.client import ChatClient, verify_chat, verify_model
from trainer.judge.served import ServedReader
from trainer.types import Completion, SamplingParams

pytestmark = pytest.mark.gpu

psutil = pytest.importorskip("psutil")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FLAGS = tuple(shlex.split(os.environ.get("CLUSTERKIT_SGLANG_FLAGS", "")))
QUESTIONS = ["What is the capital of France?", "Name three rivers of Germany.", "Why is the sky blue?"]
QUESTIONS += ["Write a line about autumn.", "What does a compiler do?", "How do bees find flowers?"]
QUESTIONS += ["Explain what a memory is.", "List five fruits."]
MEAN_DIFFERENCE = 0.05
MEMORY = {"core": "the user is Ada", "semantic": {"sem_0001": "Ada lives in Arnby"}, "episodic": {}}


@dataclass
class Served:
    """Two servers on one GPU and their engine; `folders` are the weight versions."""

    pool: ServerPool
    engine: ServedEngine
    processes: list[ServerProcess]
    tokenizer: Any
    folders: dict[int, Path]
    end_ids: tuple[int, ...]
    models: dict[int, Any] = field(default_factory=dict)

    def prompt(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    async def update(self, version: int) -> None:
        await self.engine.update_from_folder(self.folders[version], version)

    async def ask(self, params: list[tuple[list[int], SamplingParams]], key: str = "") -> list[Completion]:
        return list(await asyncio.gather(*(self.engine.generate(p, s, key=key or str(p)) for p, s in params)))

    def score(self, version: int, prompt: list[int], done: Completion, temperature: float = 1.0) -> Any:
        """transformers' log-probs, in float32, of the response's tokens under a version's weights."""
        if version not in self.models:
            model = transformers.AutoModelForCausalLM.from_pretrained(self.folders[version], dtype=torch.float32)
            self.models[version] = model.cuda()
        ids = torch.tensor([prompt + done.token_ids], device="cuda")
        with torch.inference_mode():
            logits = self.models[version](ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def options(model: Path, log: Path, name: str, **changes: Any) -> ServerOptions:
    return ServerOptions(model, log, name, **{"memory_fraction": 0.3, "flags": FLAGS, **changes})


def mean_difference(scored: Any, done: Completion) -> float:
    return float((scored - torch.tensor(done.logprobs)).abs().mean())


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("CLUSTERKIT_TEST_LOGS")
    return Path(folder) if folder else tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def perturbed(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise on its weights, written as the trainer's export writes it."""
    folder = tmp_path_factory.mktemp("weights") / "v1"
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(smollm2_path: Path, perturbed: Path, logs: Path) -> Iterator[Served]:
    if not torch.cuda.is_available() or importlib.util.find_spec("sglang") is None:
        require(False, "needs a CUDA device and SGLang in this Python")
    folders = {0: smollm2_path, 1: perturbed}
    dialect = make_dialect("sglang")
    pool = ServerPool(dialect.health_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    engine = ServedEngine(pool, dialect, smollm2_path, {tokenizer.eos_token_id})

    async def start() -> list[ServerProcess]:
        processes = []
        for name in ("one", "two"):  # one after the other: each measures the GPU's free memory while it starts
            server, process = await launch("sglang", options(smollm2_path, logs / f"{name}.log", name))
            assert await engine.join(server)
            processes.append(process)
        return processes

    processes = asyncio.run(start())
    eos = transformers.GenerationConfig.from_pretrained(smollm2_path).eos_token_id
    ends = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
    yield Served(pool, engine, processes, tokenizer, folders, tuple(sorted(e for e in ends if e is not None)))
    family = [child for p in processes if p.running for child in psutil.Process(p.pid).children(recursive=True)]

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes))
        await pool.close()

    asyncio.run(stop())
    assert psutil.wait_procs(family, timeout=30)[1] == []


def test_it_answers_like_the_model_that_it_is(served: Served) -> None:
    (done,) = asyncio.run(served.ask([(served.prompt(QUESTIONS[0]), SamplingParams(64, temperature=0))]))
    assert "Paris" in served.tokenizer.decode(done.token_ids)
    assert done.finish_reason == "stop"
    assert done.token_ids[-1] in served.end_ids
    assert done.version == 0


def test_its_cache_of_prefixes_is_the_one_that_was_chosen_for_it(served: Served, logs: Path) -> None:
    assert served.processes
    assert "source=registered('clusterkit')" in (logs / "one.log").read_text(encoding="utf-8")


def test_greedy_tokens_are_the_same_every_time(served: Served) -> None:
    async def rounds() -> list[list[list[int]]]:
        found = []
        for _ in range(2):
            for server in served.pool.usable():
                await served.pool.call(server, "POST", "/flush_cache", {}, 30)
            found.append(
                [(await served.ask([(served.prompt(q), SamplingParams(64, 0))]))[0].token_ids for q in QUESTIONS]
            )
        return found

    first, second = asyncio.run(rounds())
    assert first == second


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_agree_with_transformers(served: Served, temperature: float) -> None:
    prompts = [served.prompt(q) for q in QUESTIONS]
    dones = asyncio.run(served.ask([(p, SamplingParams(64, temperature, seed)) for seed, p in enumerate(prompts)]))
    pairs = list(zip(prompts, dones, strict=True))
    differences = [mean_difference(served.score(0, p, done, temperature), done) for p, done in pairs]
    print(f"temperature {temperature}: mean |difference of log-probs| {sum(differences) / len(differences):.4f}")
    assert sum(differences) / len(differences) < MEAN_DIFFERENCE


def test_banned_tokens_are_not_sampled(served: Served) -> None:
    prompt = served.prompt(QUESTIONS[0])
    (free,) = asyncio.run(served.ask([(prompt, SamplingParams(8, 0))]))
    (bound,) = asyncio.run(served.ask([(prompt, SamplingParams(8, 0, banned_token_ids=tuple(free.token_ids)))]))
    assert not set(free.token_ids) & set(bound.token_ids)


def test_64_requests_of_8_groups_and_a_group_shares_its_prompt(served: Served) -> None:
    filler = "The river runs past the mill and the old bridge to the sea. " * 60

    async def run() -> list[Completion]:
        jobs = []
        for group in range(8):
            prompt = served.prompt(f"Text {group}: {filler} What is in the text?")
            params = [SamplingParams(64, 1.0, seed, served.end_ids) for seed in range(8)]
            jobs += [served.engine.generate(prompt, p, key=f"group-{group}") for p in params]
        # One of each group goes ahead: what arrives in the same moment is not shared by SGLang.
        return [*await asyncio.gather(*jobs[::8]), *await asyncio.gather(*(j for n, j in enumerate(jobs) if n % 8))]

    before = served.engine.stats.cached_tokens, served.engine.stats.prompt_tokens
    dones = asyncio.run(run())
    assert [len(done.token_ids) for done in dones] == [64] * 64
    cached = served.engine.stats.cached_tokens - before[0]
    prompts = served.engine.stats.prompt_tokens - before[1]
    print(f"cached {cached} of {prompts} prompt tokens")
    assert cached / prompts > 0.5


def test_a_prompt_beyond_the_context_is_refused(served: Served) -> None:
    with pytest.raises(RefusedError, match="context length"):
        asyncio.run(served.ask([([1] * 9000, SamplingParams(8))]))
    assert len(served.pool.usable()) == 2


def test_folders_that_do_not_fit_change_nothing(served: Served, tmp_path: Path) -> None:
    good = served.folders[1]
    served.folders[1] = shutil.copytree(good, tmp_path / "cut")
    file = served.folders[1] / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(EngineError, match="is cut short"):
        asyncio.run(served.update(1))
    served.folders[1] = good

    async def past_our_check() -> str:
        bare = tmp_path / "bare"
        bare.mkdir()
        shutil.copy(good / "config.json", bare)
        body = {"model_path": str(bare), "weight_version": "9"}
        with pytest.raises(RefusedError) as caught:
            await served.pool.call(served.pool.servers[0], "POST", "/update_weights_from_disk", body, 60)
        return str(caught.value)

    assert UNTOUCHED in asyncio.run(past_our_check())
    prompt = served.prompt(QUESTIONS[1])
    (done,) = asyncio.run(served.ask([(prompt, SamplingParams(64))]))
    assert done.version == served.engine.version == 0
    assert mean_difference(served.score(0, prompt, done), done) < MEAN_DIFFERENCE


def test_new_weights_are_used_and_told_also_in_the_middle_of_a_response(served: Served) -> None:
    prompts = [served.prompt(q) for q in QUESTIONS]
    asked = [(prompts[n % 8], SamplingParams(1500, 1.0, n, served.end_ids)) for n in range(32)]

    async def run() -> list[Completion]:
        jobs = asyncio.gather(*(served.engine.generate(p, s, key=str(n % 8)) for n, (p, s) in enumerate(asked)))
        await asyncio.sleep(1.0)  # some of each response; the test holds however much that is
        await served.update(1)
        return list(await jobs)

    dones = asyncio.run(run())
    stats = served.engine.stats
    print(
        f"pause {stats.pause_seconds:.3f} s, load {stats.transfer_seconds:.3f} s, resume {stats.resume_seconds:.4f} s"
    )
    changed = [(p, done) for (p, _), done in zip(asked, dones, strict=True) if done.spans]
    assert changed, "no response was under way: it was sampled faster than the update came"
    assert [len(done.token_ids) for done in dones] == [1500] * 32
    assert served.engine.version == 1
    for prompt, done in changed[:4]:
        assert [version for version, _ in done.spans] == [0, 1]
        versions = torch.tensor(token_versions(done))
        given = torch.tensor(done.logprobs)
        by = {version: (served.score(version, prompt, done) - given).abs() for version in (0, 1)}
        print(f"spans {done.spans}: own {[float(by[v][versions == v].mean()) for v in (0, 1)]}")
        for version in (0, 1):
            assert float(by[version][versions == version].mean()) < MEAN_DIFFERENCE
            assert float(by[1 - version][versions == version].mean()) > 2 * MEAN_DIFFERENCE


def test_no_response_sees_what_older_weights_left_in_the_cache(served: Served) -> None:
    prompt = served.prompt(QUESTIONS[2])  # both versions have it in their caches
    (done,) = asyncio.run(served.ask([(prompt, SamplingParams(64))]))
    assert done.version == 1
    assert mean_difference(served.score(1, prompt, done), done) < MEAN_DIFFERENCE


def test_with_seeds_a_deterministic_server_gives_the_same_response_in_any_company(
    served: Served, smollm2_path: Path, logs: Path
) -> None:
    async def run() -> tuple[list[Completion], list[Completion]]:
        wanted = options(smollm2_path, logs / "deterministic.log", "three", deterministic=True, memory_fraction=0.2)
        server, process = await launch("sglang", wanted)
        dialect = SGLangDialect()
        engine = ServedEngine(ServerPool(dialect.health_path), dialect, smollm2_path, set(served.end_ids))
        try:
            await engine.join(server)
            asked = [(served.prompt(q), SamplingParams(64, 1.0, 77 + n)) for n, q in enumerate(QUESTIONS)]
            alone = [await engine.generate(p, s) for p, s in asked]
            together = await asyncio.gather(*(engine.generate(p, s) for p, s in asked))
            return alone, list(together)
        finally:
            await process.stop()
            await engine.pool.close()

    alone, together = asyncio.run(run())
    assert [done.token_ids for done in alone] == [done.token_ids for done in together]
    assert [done.logprobs for done in alone] == [done.logprobs for done in together]


def test_a_judge_answers_in_words(served: Served, smollm2_path: Path, logs: Path) -> None:
    """As `clusterkit serve judge` starts it: chats, and JSON by a schema."""

    async def ask() -> None:
        wanted = options(smollm2_path, logs / "judge.log", "judge", chats=True, fp32_head=False)
        server, process = await launch("sglang", wanted)
        try:
            name = await asyncio.to_thread(verify_model, server.url, smollm2_path.name)
            await asyncio.to_thread(verify_chat, server.url, name, 60.0)
            reader = ServedReader(ChatClient(lambda: [server.url], name), 20, 32, 0.7, 128)
            assert await reader.answer("Where does Ada live?", MEMORY)
            assert isinstance(await reader.worth_keeping("semantic", "Ada lives in Arnby", ""), bool)
            assert reader.counts().get("judge_unanswered", 0) == 0
        finally:
            await process.stop()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": (99,)}, "the server sees no GPU"),
        ({"memory_fraction": 0.0005}, "nothing is left for the KV cache"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    served: Served,
    smollm2_path: Path,
    logs: Path,
    changes: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "gpus" in changes:  # else it is refused here already: it is not among those that we may use
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    wanted = options(smollm2_path, logs / f"fails_{next(iter(changes))}.log", "failing", **changes)
    with pytest.raises(ServerStartError, match=reason) as caught:
        asyncio.run(launch("sglang", wanted))
    print(caught.value)


def test_a_killed_server_hands_its_requests_to_the_other_and_the_last_one_tells(served: Served) -> None:
    prompts = [served.prompt(q) for q in QUESTIONS]
    asked = [(prompts[n % 8], SamplingParams(800, 1.0, n, served.end_ids)) for n in range(32)]

    def kill(process: ServerProcess) -> None:
        (server,) = psutil.Process(process.pid).children()
        os.kill(server.pid, signal.SIGKILL)

    async def run() -> list[Completion]:
        jobs = asyncio.gather(*(served.engine.generate(p, s, key=str(n)) for n, (p, s) in enumerate(asked)))
        victim: Server = served.pool.servers[1]
        while victim.in_flight < 5:
            await asyncio.sleep(0.01)
        kill(served.processes[1])
        return list(await jobs)

    dones = asyncio.run(run())
    assert [len(done.token_ids) for done in dones] == [800] * 32
    assert [server.name for server in served.pool.usable()] == ["one"]
    assert served.pool.redispatched >= 5
    kill(served.processes[0])
    while any(process.running for process in served.processes):
        time.sleep(0.01)
    with pytest.raises(EngineError, match=r"no inference server is left \(one: .*SIGKILL.*two: .*SIGKILL"):
        asyncio.run(served.ask([(prompts[0], SamplingParams(8))]))
