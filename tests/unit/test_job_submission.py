"""Jobs submitted to a Ray that is just starting. Its HTTP API is a fake: a real one is in that state for an instant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from clusterkit.backends.ray import jobs
from clusterkit.backends.ray.jobs import DuplicateJobError, NoAgentError, RayJobs

NO_AGENT = httpx.Response(500, text="No available agent to submit job, please try again later.")


def submit(answers: Iterator[httpx.Response], asked: list[str]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["submission_id"])
        return next(answers)

    async def run() -> None:
        async with httpx.AsyncClient(base_url="http://head", transport=httpx.MockTransport(answer)) as client:
            await RayJobs(client, "h1").submit("job-1", "true", environment={}, metadata={})

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AGENT_LOOK_SECONDS", 0.0)


def test_a_job_waits_for_the_agent_of_a_ray_that_is_just_starting() -> None:
    asked: list[str] = []

    submit(iter([NO_AGENT, NO_AGENT, httpx.Response(200, json={"submission_id": "job-1"})]), asked)

    assert asked == ["job-1"] * 3


def test_without_any_agent_the_job_is_refused_with_rays_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AGENT_SECONDS", 0.0)

    with pytest.raises(NoAgentError, match=r"No available agent to submit job.*clusterkit ray-status"):
        submit(iter([NO_AGENT] * 1000), [])


def test_another_refusal_is_not_asked_again() -> None:
    asked: list[str] = []

    with pytest.raises(DuplicateJobError):
        submit(iter([httpx.Response(500, text="Job with submission_id job-1 already exists.")]), asked)

    assert asked == ["job-1"]
