"""The judge's client against servers that are slow, gone, wrong or make no sense; retrieval; registry; cache."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import small_config
from httpstub import Answer, Drop, Hang, HttpStub

from trainer.errors import RunError, UserError
from trainer.judge import client as client_module
from trainer.judge.cache import AnswerCache
from trainer.judge.client import ChatClient, Timeouts, verify_model
from trainer.judge.priority_limiter import ORDER
from trainer.judge.reader import RuleReader, Unanswered
from trainer.judge.served import Ranking, ServedReader, make_served_reader, read_verdict, read_yes_no
from trainer.judge.servers import judges_folder
from trainer.paths import user_name
from trainer.serving import registry

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
MEMORY = {"core": "the user is Ada", "semantic": {"sem_0001": "Ada lives in Arnby"}, "episodic": {}}


def says(text: Any) -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def serves(*names: str) -> Answer:
    return 200, {"data": [{"id": name} for name in names]}


class Judge(HttpStub):
    """Answers chats with the given answers in turn, the last one again and again, and lists one model."""

    def __init__(self, *answers: Answer, model: str = "judge") -> None:
        super().__init__(self._handle)
        self.answers, self.model = list(answers), model

    async def _handle(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        if path == MODELS:
            return serves(self.model)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def client(*servers: HttpStub, wait: float = 20.0, cache: AnswerCache | None = None, answer: float = 5.0) -> ChatClient:
    return ChatClient(lambda: [s.url for s in servers], "judge", 8, Timeouts(answer, wait, 2.0), cache)


def reader(*servers: HttpStub, **changes: Any) -> ServedReader:
    return ServedReader(client(*servers, **changes), 20, 64, 0.7, 128)


def test_a_question_is_asked_with_the_memory_and_answered() -> None:
    async def ask() -> None:
        async with Judge(says("<think>hm</think> Arnby")) as server:
            assert await reader(server).answer("Where does Ada live?", MEMORY) == "Arnby"
            _, _, body = server.seen[-1]
            assert body["model"] == "judge"
            assert "- Ada lives in Arnby" in body["messages"][0]["content"]
            assert "the user is Ada" in body["messages"][0]["content"]
            assert body["messages"][1]["content"] == "Where does Ada live?"

    asyncio.run(ask())


@pytest.mark.parametrize("trouble", [(500, {}), (429, {}), (503, {}), Drop(), Hang()])
def test_a_server_in_trouble_is_asked_again(trouble: Answer) -> None:
    async def ask() -> None:
        async with Judge(trouble, says("yes")) as server:
            one = client(server, answer=0.5)
            assert await one.chat([{"role": "user", "content": "?"}]) == "yes"
            assert one.counters["judge_retries"] == 1

    asyncio.run(ask())


def test_another_server_answers_for_one_that_is_gone() -> None:
    async def ask() -> None:
        async with Judge(says("first")) as gone, Judge(says("second")) as there:
            gone.die()
            answers = [await client(gone, there).chat([{"role": "user", "content": str(i)}]) for i in range(4)]
            assert answers == ["second"] * 4

    asyncio.run(ask())


def test_a_judge_that_hangs_beside_others_is_named_and_asked_seldom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost half of all requests the time for an answer, and take them for too many."""
    later = 0.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))

    async def ask() -> None:
        nonlocal later
        async with Judge(Hang()) as hangs, Judge(says("x")) as works:
            one = client(hangs, works, answer=0.3)
            told = f"the judge at {hangs.url} does not answer (no answer within 0.3 s) while others do"

            async def chats(first: int, count: int) -> None:
                await asyncio.gather(*(one.chat([{"role": "user", "content": str(first + n)}]) for n in range(count)))

            await chats(0, 8)
            assert (caplog.text.count(told), hangs.count(CHAT), "too many" in caplog.text) == (1, 4, False)
            await chats(8, 32)
            assert hangs.count(CHAT) == 4
            later = 61.0
            await chats(40, 32)
            assert (hangs.count(CHAT), caplog.text.count(told)) == (5, 1)
            hangs.answers, later = [says("x")], 122.0
            await chats(72, 1)
            assert f"the judge at {hangs.url} answers again" in caplog.text
            await chats(73, 8)
            assert hangs.count(CHAT) == 10

    asyncio.run(ask())


def test_a_run_waits_for_a_judge_that_is_gone_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        servers: list[HttpStub] = []
        one = ChatClient(lambda: [s.url for s in servers], "judge", 8, Timeouts(5.0, 60.0, 2.0))
        waiting = asyncio.ensure_future(one.chat([{"role": "user", "content": "?"}]))
        while "the run waits" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        async with Judge(says("here")) as server:
            servers.append(server)  # at an address that was not known before
            assert await waiting == "here"
            assert "answers again" in caplog.text

    asyncio.run(ask())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_judge_that_stays_away_ends_the_run_with_its_address_and_what_to_do(hangs: bool) -> None:
    async def ask() -> None:
        async with Judge(Hang()) as server:
            if not hangs:
                server.die()
            told = rf"has not answered for .*{re.escape(server.url)}: .*clusterkit serve judge.*recover checkpoint"
            with pytest.raises(RunError, match=told):
                await client(server, wait=0.3, answer=0.2).chat([{"role": "user", "content": "?"}])

    asyncio.run(ask())


def test_another_model_in_the_judges_place_is_not_asked() -> None:
    async def ask() -> None:
        async with Judge((500, {}), says("I am another"), model="impostor") as server:
            with pytest.raises(RunError, match="came back with impostor in place of judge"):
                await client(server).chat([{"role": "user", "content": "?"}])

    asyncio.run(ask())


def test_a_request_that_is_refused_is_that_requests_failure() -> None:
    async def ask() -> None:
        async with Judge((400, {"message": "too long"})) as server:
            one = reader(server)
            with pytest.raises(Unanswered, match="too long"):
                await one.answer("Where?", MEMORY)
            assert one.counts()["judge_unanswered"] == 1

    asyncio.run(ask())


def test_a_memory_too_long_for_the_judge_is_shown_in_part() -> None:
    async def ask() -> None:
        async with Judge((400, {"message": "too long"}), says("Arnby")) as server:
            many = {**MEMORY, "semantic": {f"sem_{i}": f"fact {i}" for i in range(10)}}
            assert await reader(server).answer("Where?", many) == "Arnby"
            shown = [body["messages"][0]["content"].count("- fact") for _, path, body in server.seen if path == CHAT]
            assert shown == [10, 5]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"VALID": true, "REASON": "clear"}', True),
        ('Sure! ```json\n{"valid": "No", "reason": "empty"}\n```', False),
        ('<think>{"VALID": true}</think>{"VALID": false}', False),
        ('{"VALID": "vielleicht"}', None),
        ("是的", None),
        ("{{{{", None),
        ("", None),
        ('{"REASON": "x"}', None),
    ],
)
def test_verdicts_are_read_or_not_at_all(text: str, verdict: bool | None) -> None:
    assert read_verdict(text) is verdict


@pytest.mark.parametrize(
    ("text", "said"), [("Yes.", True), ("no", False), ("NO, it lacks", False), ("yes and no", None), ("oui", None)]
)
def test_yes_or_no(text: str, said: bool | None) -> None:
    assert read_yes_no(text) is said


def test_garbage_is_asked_about_once_more_and_counted_never_taken_for_no() -> None:
    async def ask() -> None:
        async with Judge(says("是的"), says('{"VALID": true}'), says("blah")) as server:
            one = reader(server)
            assert await one.worth_keeping("semantic", "a fact", "") is True
            with pytest.raises(Unanswered, match="blah"):
                await one.worth_keeping("semantic", "another", "")
            counts = one.counts()
            assert counts["judge_unreadable"] == 3
            assert counts["judge_unanswered"] == 1
            assert one.counts() == {}

    asyncio.run(ask())


def test_a_server_without_schemas_is_asked_without() -> None:
    async def ask() -> None:
        async with Judge((400, {"message": "response_format"}), says('{"VALID": false, "REASON": ""}')) as server:
            one = reader(server)
            assert await one.worth_keeping("semantic", "a", "") is False
            assert await one.worth_keeping("semantic", "b", "") is False
            bodies = [body for _, path, body in server.seen if path == CHAT]
            assert ["response_format" in body for body in bodies] == [True, False, False]
            schema = bodies[0]["response_format"]["json_schema"]["schema"]
            assert list(schema["properties"]) == ["VALID"]  # more would cost tokens and change nothing

    asyncio.run(ask())


@pytest.mark.filterwarnings("error")
def test_connections_end_with_their_event_loop_and_the_next_one_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(one: ChatClient, urls: list[str], said: str) -> None:
        async with Judge(says(said)) as server:
            urls[:] = [server.url]
            assert await one.chat([{"role": "user", "content": said}]) == said

    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # what other tests have left is not looked at
    urls: list[str] = []
    one = ChatClient(lambda: urls, "judge", 8, Timeouts(5.0, 5.0, 2.0))
    asyncio.run(ask(one, urls, "here"))
    asyncio.run(ask(one, urls, "there"))
    del one
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_answers_are_kept_on_disk_by_content_and_asked_for_once(tmp_path: Path) -> None:
    async def ask() -> None:
        async with Judge(says("one"), says("two"), says("three")) as server:
            first = client(server, cache=AnswerCache(tmp_path))
            both = await asyncio.gather(*(first.chat([{"role": "user", "content": "same"}]) for _ in range(5)))
            assert both == ["one"] * 5
            (kept,) = tmp_path.glob("*.jsonl")
            with kept.open("a") as file:
                file.write('{"key": "torn')  # by a kill
            second = client(server, cache=AnswerCache(tmp_path))
            assert await second.chat([{"role": "user", "content": "same"}]) == "one"
            assert await second.chat([{"role": "user", "content": "same"}], temperature=0.5) == "two"
            assert server.count(CHAT) == 2

    asyncio.run(ask())


def test_no_more_requests_are_under_way_than_allowed() -> None:
    async def ask() -> None:
        now = most = 0

        async def slow(method: str, path: str, body: dict[str, Any]) -> Answer:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            now -= 1
            return says("x")

        async with HttpStub(slow) as server:
            one = ChatClient(lambda: [server.url], "judge", 3, Timeouts(5.0, 5.0, 2.0))
            await asyncio.gather(*(one.chat([{"role": "user", "content": str(i)}]) for i in range(20)))
        assert most == 3

    asyncio.run(ask())


@pytest.mark.parametrize("refuses", [False, True], ids=["answers late", "says that it has too many"])
def test_a_judge_that_is_too_slow_is_asked_fewer_at_a_time_and_all_is_answered(
    refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A server for two at a time, that works on what was given up, too: asked 48 at once it would never be done."""

    async def ask() -> tuple[list[str], int]:
        places, waiting = asyncio.Semaphore(2), 0

        async def slow(method: str, path: str, body: dict[str, Any]) -> Answer:
            nonlocal waiting
            if path == MODELS:
                return serves("judge")
            if refuses and waiting >= 4:
                return 503, {"message": "too many"}
            waiting += 1
            async with places:
                await asyncio.sleep(0.06)
            waiting -= 1
            return says("yes")

        async with HttpStub(slow) as server:
            one = ChatClient(lambda: [server.url], "judge", 48, Timeouts(0.7, 60.0, 2.0))
            questions = ([{"role": "user", "content": str(number)}] for number in range(96))
            answers = await asyncio.gather(*map(one.chat, questions))
            return list(answers), sum(path == CHAT for _, path, _ in server.seen)

    answers, asked = asyncio.run(ask())
    assert answers == ["yes"] * 96
    assert asked < 3 * 96
    assert "48 requests at a time are too many for the judge: 24 from now on" in caplog.text


def test_a_request_that_alone_takes_too_long_is_its_own_failure() -> None:
    async def ask() -> None:
        async def endless(method: str, path: str, body: dict[str, Any]) -> Answer:
            if path == MODELS:
                return serves("judge")
            return Hang() if "endless" in body["messages"][0]["content"] else says('{"VALID": true}')

        async with HttpStub(endless) as server:
            one = ServedReader(ChatClient(lambda: [server.url], "judge", 8, Timeouts(0.3, 60.0, 2.0)), 20, 64, 0.7, 64)
            waiting = asyncio.ensure_future(one.worth_keeping("semantic", "endless", ""))
            number = 0
            while not waiting.done():
                number += 1
                assert await one.worth_keeping("semantic", str(number), "")
                await asyncio.sleep(0.02)
            with pytest.raises(Unanswered, match="8 times, while others were answered"):
                await waiting
            assert one.counts()["judge_unanswered"] == 1
            assert all("response_format" in body for _, path, body in server.seen if path == CHAT)

    asyncio.run(ask())


def test_requests_of_older_groups_go_first_and_one_given_up_keeps_no_slot() -> None:
    async def ask() -> list[str]:
        held, sent = asyncio.Event(), list[str]()

        async def slow(_: str, __: str, body: dict[str, Any]) -> tuple[int, Any]:
            sent.append(body["messages"][0]["content"])
            await held.wait()
            return says("x")

        async def of_group(one: ChatClient, order: int) -> None:
            ORDER.set(order)
            await one.chat([{"role": "user", "content": str(order)}])

        async with HttpStub(slow) as server:
            one = ChatClient(lambda: [server.url], "judge", 1, Timeouts(5.0, 5.0, 2.0))
            jobs = {order: asyncio.create_task(of_group(one, order)) for order in (9, 7, 8, 6)}
            while not sent:
                await asyncio.sleep(0.01)
            jobs.pop(6).cancel()
            held.set()
            await asyncio.gather(*jobs.values())
        return sent

    assert asyncio.run(ask()) == ["9", "7", "8"]


def judged_config(tmp_path: Path, *settings: str) -> Any:
    return small_config(f"fileroot={tmp_path}", f"cache_dir={tmp_path / 'cache'}", *settings)


def test_a_run_is_refused_where_no_judge_can_be_reached(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no judge is registered for .*serve judge \S+/run1 .*--cluster.*judge\.url="):
        make_served_reader(judged_config(tmp_path))
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 cannot be reached.*start it"):
        make_served_reader(judged_config(tmp_path, "judge.url=http://127.0.0.1:9"))


def test_the_judges_model_is_verified() -> None:
    async def ask() -> None:
        async with Judge(says("x"), model="/storage/models/Qwen3-14B") as server:
            found = await asyncio.to_thread(verify_model, server.url, "Qwen/Qwen3-14B")
            assert found == "/storage/models/Qwen3-14B"
            with pytest.raises(UserError, match=r"serves /storage/models/Qwen3-14B, not Qwen3-32B.*judge\.model"):
                await asyncio.to_thread(verify_model, server.url, "Qwen3-32B")

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, {"message": "no attribute 'apply_chat_template'"}), "apply_chat_template.*look at its log"),
        ((400, {"message": "no chat template is set"}), "no chat template is set.*serve a model with a chat template"),
        ((401, {"message": "no key"}), "asks for a key.*CLUSTERKIT_JUDGE_KEY"),
        (Drop(), "answers no chat"),
    ],
)
def test_a_run_is_refused_where_the_judge_lists_its_model_and_answers_no_chat(
    answer: Answer, told: str, tmp_path: Path
) -> None:
    async def ask() -> None:
        async with Judge(answer) as server:
            config = judged_config(tmp_path, f"judge.url={server.url}")
            with pytest.raises(UserError, match=told):
                await asyncio.to_thread(make_served_reader, config)

    asyncio.run(ask())


def put_registration(folder: Path, name: str, state: registry.State, url: str, base: str = "") -> None:
    registry.write(folder, registry.Registration(name, "vllm", "/models/small", "node", 1, 0.0, state, url, base=base))


def test_registered_judges_are_found_by_experiment_and_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with Judge(says("Arnby"), model="models/small") as server:
            config = judged_config(tmp_path, "judge.model=small")
            folder = judges_folder(tmp_path, user_name(), config.experiment_name, config.trial_name)
            put_registration(folder, "judge-0", "ready", "http://127.0.0.1:9")  # of a host that is gone
            put_registration(folder, "judge-1", "starting", "")
            with pytest.raises(UserError, match="cannot be reached"):
                await asyncio.to_thread(make_served_reader, config)
            put_registration(folder, "judge-2", "ready", server.url)
            one = await asyncio.to_thread(make_served_reader, config)
            assert "http://127.0.0.1:9 cannot be reached" in caplog.text
            assert await one.answer("Where?", MEMORY) == "Arnby"
            newer = server.url.replace("127.0.0.1", "localhost")
            put_registration(folder, "judge-3", "ready", newer)
            assert newer in one.client.urls()

    asyncio.run(ask())


def test_answers_of_a_judge_are_not_those_of_other_weights_at_its_place(tmp_path: Path) -> None:
    async def ask() -> list[str]:
        async with Judge(says("first"), model="models/small") as server:
            config = judged_config(tmp_path)
            folder, answers = judges_folder(tmp_path, user_name(), config.experiment_name, config.trial_name), []
            for base, replies in (("a" * 64, "first"), ("a" * 64, "later"), ("b" * 64, "second")):
                put_registration(folder, "judge-0", "ready", server.url, base)
                one = await asyncio.to_thread(make_served_reader, config)
                server.answers = [says(replies)]
                answers.append(await one.answer("Where?", MEMORY))
            return answers

    assert asyncio.run(ask()) == ["first", "first", "second"]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="is no address"):
        small_config("judge.url=gpu03:30000")


def test_a_server_that_nobody_would_ask_is_refused() -> None:
    with pytest.raises(UserError, match=r"judge\.reader=rules never asks: set judge\.reader=server"):
        small_config("judge.reader=rules", "judge.url=http://gpu03:30000")


def test_retrieval_takes_the_entries_with_the_questions_rare_words() -> None:
    entries = {f"sem_{i}": f"The river Number{i} is a river near a town" for i in range(100)}
    entries["sem_x"] = "ADA was born in Arnby, a town."
    best = Ranking(entries, 20).best("Where was Ada born?")

    assert len(best) == 20
    assert next(iter(best)) == "sem_x"
    assert Ranking({"a": "x", "b": "y"}, 20).best("nothing") == {"a": "x", "b": "y"}
    assert list(Ranking(entries, 3).best("zzz qqq")) == ["sem_98", "sem_99", "sem_x"]


def test_rules_answer_from_facts() -> None:
    memory = {"core": "kigo honey . tome paper", "semantic": {"1": "bako lamp", "2": "bako chair"}, "episodic": {}}
    one = RuleReader()

    assert asyncio.run(one.answer("bako", memory)) == "chair"  # what was written last
    assert asyncio.run(one.answer("kigo", memory)) == "honey"
    assert asyncio.run(one.answer("dilu", memory)) == ""
    assert json.dumps(one.counts()) == "{}"
