"""What `eval` and `train` on a cluster copy: checkpoints and data of this machine, through a real SSH server.

The storage is a folder of this machine, so what arrives is used at once: rows are made of it, as the job would.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from evalparts import chat_checkpoint, problems_file, recall_checkpoint, recall_config
from hub import FakeHub
from sshd import Ssh, Sshd

from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.request import request_on
from clusterkit.backends.ray.stage_inputs import have_assets
from clusterkit.evaluate.remote import remote_request
from clusterkit.evaluate.request import EvalArguments
from clusterkit.hosts.model import Cluster
from clusterkit.provision import cluster_lock
from clusterkit.provision.images.lock import Lock
from clusterkit.runs.directory import user_name
from clusterkit.ssh.session import SshSession
from evaluation.config import EvalConfig
from evaluation.plan import Row, make_rows
from tests.conftest import mini_hotpotqa_rows
from trainer.config import RunConfig
from trainer.errors import RunError, UserError

pytest_plugins = ["sshd_fixture"]

Ask = Callable[..., EvalConfig]


@pytest.fixture
def storage(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = ssh.folder / "storage"
    folder.mkdir()
    monkeypatch.delenv("CLUSTERKIT_DATA", raising=False)
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(ssh.folder / "cache"))
    return folder


@pytest.fixture
def make_ask(ssh: Ssh, storage: Path, tmp_path: Path) -> Callable[..., Ask]:
    """Makes `ask` over a server with further settings."""
    return lambda *settings: asking(ssh, ssh.servers(*settings), storage, tmp_path)


@pytest.fixture
def ask(make_ask: Callable[..., Ask]) -> Ask:
    """Makes the request of an evaluation; `said` gets what was told."""
    return make_ask()


def asking(ssh: Ssh, server: Sshd, storage: Path, tmp_path: Path) -> Ask:
    def make(names: str = "", *, change: bool = True, said: list[str] | None = None, **more: Any) -> EvalConfig:
        values = {"model_path": None, "output_path": "out", "data_path": "", "preset": None, "fileroot": str(tmp_path)}
        suites = tuple(filter(None, names.split(",")))
        typed = EvalArguments(data_names=suites, compare=(), values={}, **{"settings": (), **values, **more})

        async def work(session: SshSession) -> EvalConfig:
            cluster = Cluster(name="c", hosts=(session.host,), storage=str(storage))
            told = [] if said is None else said
            made = await remote_request(Head(session, cluster, "token"), typed, told.append, change=change)
            assert isinstance(made, EvalConfig)
            return made

        return ssh.with_session(server, work)

    return make


def rows_there(config: EvalConfig, storage: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows as the job makes them, which has nothing but the storage."""
    monkeypatch.setenv("CLUSTERKIT_DATA", str(storage / "datasets"))
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(storage / "none"))
    assert config.data_path == "" or config.data_path.startswith(f"{storage}/")
    rows = make_rows(config, "checkpoint", "embedded")
    assert all(row.suite.load(len) for row in rows)
    return rows


def run_here(fileroot: Path, trial: str, **task: Any) -> Path:
    """A run of this machine with one checkpoint of random weights."""
    folder = fileroot / "checkpoints" / user_name() / "tiny-recall" / trial / "actor" / "epoch1epochstep2globalstep2"
    recall_checkpoint(folder)
    (folder / "mark.txt").write_text(trial)
    asked = recall_config(Path("x"), Path("y"))
    values: dict[str, Any] = {"agent": asked.agent.model_dump(), "task": task or asked.task.model_dump()}
    if task:  # what only a pretrained model learns
        values |= {"model": {"path": "m"}, "agent": {"name": "single_turn"} if task["name"] == "math" else {}}
    logs = fileroot / "logs" / user_name() / "tiny-recall" / trial
    logs.mkdir(parents=True)
    (logs / "config.yaml").write_text(yaml.safe_dump(RunConfig.model_validate(values).model_dump()))
    return folder


def test_a_run_of_this_machine_goes_there_with_its_settings_and_under_a_name_of_its_own(
    ask: Ask, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_here(tmp_path, "run1")
    run_here(tmp_path, "run2")
    config = ask(model_path=str(first))
    other = ask(model_path="tiny-recall/run2")
    assert config.model_path == f"{storage}/models/tiny-recall-run1-epoch1epochstep2globalstep2"
    assert [(Path(one.model_path) / "mark.txt").read_text() for one in (config, other)] == ["run1", "run2"]
    assert (config.agent.chunk_tokens, config.data_names, config.judge.url) == (10, ["recall"], "")
    assert [row.name for row in rows_there(config, storage, monkeypatch)] == ["recall"]
    said: list[str] = []
    assert ask(model_path=str(first), said=said) == config
    assert not [line for line in said if "copying" in line and "run1" not in line]


def test_a_folder_whose_name_another_model_has_gets_one_of_its_own(ask: Ask, storage: Path, tmp_path: Path) -> None:
    for place, seed in (("a", 0), ("b", 1)):
        chat_checkpoint(tmp_path / place / "model", seed)
    paths = [ask("niah_single", model_path=str(tmp_path / place / "model")).model_path for place in "aba"]
    assert paths[0] == paths[2] == f"{storage}/models/model"
    assert paths[1].startswith(f"{storage}/models/model-")
    weights = [(Path(path) / "model.safetensors").read_bytes() for path in paths[:2]]
    assert weights == [(tmp_path / place / "model" / "model.safetensors").read_bytes() for place in "ab"]
    shutil.rmtree(storage / "models" / "model" / "nothing", ignore_errors=True)
    assert ask("niah_single", model_path="model").model_path == paths[0]  # by its name there


def write_data(folder: Path) -> Path:
    """Data of every kind that has files, as they lie in a folder of data sets."""
    official = [{"context": "Document 1:\nx", "input": "q", "answers": ["a"], "num_docs": 1, "index": 0}]
    memory = {"instance_id": "a", "data_source": "squad", "chunks": ["c"]}
    memory["questions_and_answers"] = [{"question": "q", "answer": "a"}]  # type: ignore[assignment]
    questions, documents = mini_hotpotqa_rows()
    for name, lines in {
        "ruler_hqa/eval_100.json": [official],
        "memalpha/train.jsonl": [memory],
        "memalpha/test.jsonl": [memory],
        "hotpotqa/questions.jsonl": questions,
        "hotpotqa/documents.jsonl": documents,
        "math/aime24.jsonl": [{"id": 1, "problem": "P", "answer": "5"}],
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


NAMES = "ruler_hqa_official@100,memalpha,ruler_hqa@8,aime24"
ROWS = ["ruler_hqa_official@100", "memalpha-squad", "ruler_hqa@8", "aime24"]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_data_of_every_kind_are_copied(
    ask: Ask, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    model, data = chat_checkpoint(tmp_path / "model"), write_data(tmp_path / "data")
    if by == "variable":
        monkeypatch.setenv("CLUSTERKIT_DATA", str(data))
    more = {"model_path": str(model), "data_path": str(data) if by == "option" else ""}
    planned = ask(NAMES, change=False, **more)
    assert list(storage.rglob("*")) == []
    said: list[str] = []
    config = ask(NAMES, said=said, **more)
    assert config == planned
    assert config.data_path.startswith(f"{storage}/ray/experiments/eval/{user_name()}/out/data/")
    copied = {path.relative_to(config.data_path).as_posix() for path in Path(config.data_path).rglob("*.json*")}
    hotpotqa = {"hotpotqa/questions.jsonl", "hotpotqa/documents.jsonl"}
    assert copied == {"eval_100.json", "memalpha/test.jsonl", "aime24/test.jsonl"} | hotpotqa
    assert [row.name for row in rows_there(config, storage, monkeypatch)] == ROWS


def test_data_that_the_cluster_has_are_used_there_unless_a_folder_here_is_named(
    ask: Ask, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(chat_checkpoint(tmp_path / "model"))
    write_data(storage / "datasets")
    data = write_data(tmp_path / "data")
    config = ask(NAMES, model_path=model)
    assert config.data_path == ""
    assert [row.name for row in rows_there(config, storage, monkeypatch)] == ROWS
    monkeypatch.delenv("CLUSTERKIT_DATA")
    assert Path(ask("aime24", model_path=model, data_path=str(data)).data_path, "aime24/test.jsonl").exists()
    typed = f"{storage}/datasets"
    assert ask(NAMES, model_path=model, data_path=typed).data_path == typed
    shutil.rmtree(storage / "datasets" / "ruler_hqa")
    monkeypatch.setenv("CLUSTERKIT_DATA", str(data))
    with pytest.raises(UserError, match=r"lacks what this machine has \(.*eval_100\.json\)"):
        ask(NAMES, model_path=model, data_path=typed)


def test_a_run_on_problems_or_documents_of_this_machine_takes_them_along(
    ask: Ask, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query_id": str(n), "prompt": f"{n}+1?", "solutions": [rf"\boxed{{{n + 1}}}"]} for n in range(20)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_here(tmp_path, "sums", name="math", path=str(tmp_path), dataset="mine.jsonl", eval_fraction=0.5)
    config = ask(model_path="tiny-recall/sums")
    assert config.task.path is not None
    assert config.task.path.startswith(f"{storage}/")
    (row,) = rows_there(config, storage, monkeypatch)
    assert (row.name, row.suite.source) == ("math", config.task.path)

    monkeypatch.delenv("CLUSTERKIT_DATA")
    data = write_data(tmp_path / "data")
    run_here(tmp_path, "texts", name="hotpotqa", path=str(data / "hotpotqa"), num_documents=8)
    config = ask(model_path="tiny-recall/texts")
    (row,) = rows_there(config, storage, monkeypatch)
    assert (row.name, row.suite.source) == ("ruler_hqa@8", f"{config.data_path}/hotpotqa")


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        ("ruler_hqa_official@800", {}, r"no data of ruler_hqa_official@800 .*eval_800\.json.*--data-path"),
        ("memalpha", {}, "no data of memalpha on the cluster or on this machine"),
        ("nowhere/x.jsonl", {}, "there is no such file on this machine"),
        ("aime24", {"data_path": "/nowhere"}, "there is no such folder on this machine"),
        ("recall", {"model_path": "org/name"}, "has no runtime image to download with: run clusterkit setup"),
    ],
)
def test_what_is_nowhere_is_said(
    ask: Ask, storage: Path, tmp_path: Path, names: str, more: dict[str, str], message: str
) -> None:
    model = str(chat_checkpoint(tmp_path / "model"))
    with pytest.raises(UserError, match=message):
        ask(names, **{"model_path": model, **more})


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        ("sums.jsonl", {"settings": ("agent.chunk_tokns=5",)}, r"agent\.chunk_tok"),
        ("sums.jsonl,memalpha", {}, "no data of memalpha on the cluster or on this machine"),
    ],
)
def test_nothing_is_copied_for_an_evaluation_that_is_refused(
    ask: Ask, storage: Path, tmp_path: Path, names: str, more: dict[str, Any], message: str
) -> None:
    model, file = chat_checkpoint(tmp_path / "model"), problems_file(tmp_path)
    with pytest.raises(UserError, match=message):
        ask(names.replace("sums.jsonl", str(file)), model_path=str(model), **more)
    assert list(storage.rglob("*")) == []


DOCKER = """#!{python}
# Stands in for Docker, which needs no image here: runs the container's script with the variables that it was given.
import os, subprocess, sys
words = sys.argv[1:]
if words[0] == "run":
    given = dict(value.split("=", 1) for name, value in zip(words, words[1:]) if name == "--env")
    image = words.index("clusterkit-test:1")
    environment = {{**os.environ, **given, "HF_HOME": "{home}"}}
    sys.exit(subprocess.run(["{python}", *words[image + 1 :]], env=environment).returncode)
"""


@pytest.fixture
def docker(tmp_path: Path) -> str:
    """A setting of sshd that has hosts find the stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER.format(python=sys.executable, home=tmp_path / "hub"))
    (folder / "docker").chmod(0o755)
    return f"SetEnv PATH={folder}:/usr/local/bin:/usr/bin:/bin"


def test_a_model_of_the_hub_is_downloaded_by_the_head(
    make_ask: Callable[..., Ask], docker: str, storage: Path, tmp_path: Path, ssh: Ssh
) -> None:
    """In its runtime image, over the mirror that `clusterkit setup` was told of."""
    source = chat_checkpoint(tmp_path / "source")
    lock = Lock(reference="clusterkit-test:1", image_id="sha256:0", repo_digest="", content="", date="")
    (storage / "clusterkit").mkdir()
    (storage / "clusterkit" / "image.lock.json").write_text(lock.model_dump_json())
    site = ssh.folder / "config" / "clusters" / "c" / "site.json"
    site.parent.mkdir(parents=True)
    ask = make_ask(docker)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with FakeHub({"org/name": files}, large=("model.safetensors",)) as hub:
        site.write_text(json.dumps({"hf_endpoint": hub.url}))
        said: list[str] = []
        config = ask("niah_single", model_path="org/name", said=said)
        sent = dict(hub.sent)
        assert ask("niah_single", model_path="org/name") == config
        assert hub.sent == sent  # it is there
        with pytest.raises(RunError, match=r"download model org/other to .*/models/other failed on "):
            ask("niah_single", model_path="org/other")
    assert "org/name is no run here or on the cluster: taken as a repository of the hub" in said
    assert config.model_path == f"{storage}/models/name"
    weights = Path(config.model_path, "model.safetensors").read_bytes()
    assert weights == files["model.safetensors"]


def test_train_brings_what_the_storage_lacks(
    docker: str, storage: Path, tmp_path: Path, ssh: Ssh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a plain `clusterkit setup`: no second one is needed to fetch what a preset trains."""
    monkeypatch.setattr(cluster_lock, "NODE_FOLDER", str(tmp_path / "etc"))
    monkeypatch.setattr(cluster_lock, "node_folder", lambda cluster: f"{tmp_path}/etc/{cluster}")
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    lock = Lock(reference="clusterkit-test:1", image_id="sha256:0", repo_digest="", content="", date="")
    (storage / "clusterkit").mkdir()
    (storage / "clusterkit" / "image.lock.json").write_text(lock.model_dump_json())
    site = ssh.folder / "config" / "clusters" / "c" / "site.json"
    site.parent.mkdir(parents=True)
    files = {path.name: path.read_bytes() for path in chat_checkpoint(tmp_path / "source").iterdir()}
    data = tmp_path / "problems"
    data.mkdir()
    (data / "train.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    said: list[str] = []

    async def work(session: SshSession, settings: list[str]) -> None:
        cluster = Cluster(name="c", hosts=(session.host,), storage=str(storage))
        assets = request_on(cluster, "1.5B_n1", None, settings).assets
        await have_assets(Head(session, cluster, "token"), assets, said.append)

    server = ssh.servers(docker)
    settings = ["model.path=org/name", f"task.path={data}", "task.dataset=train.jsonl"]
    with FakeHub({"org/name": files}, large=("model.safetensors",)) as hub:
        site.write_text(json.dumps({"hf_endpoint": hub.url}))
        ssh.with_session(server, lambda session: work(session, settings))
        assert [text for text in said if "% of" not in text] == [  # a slow copy tells how far it is
            f"downloading model org/name to {storage}/models/name",
            f"copying dataset {data} to {storage}/datasets/problems",
        ]
        said.clear()
        ssh.with_session(server, lambda session: work(session, settings))
        assert not said  # all is there
        with cluster_lock.local_lock("c", "setup"), pytest.raises(UserError, match="clusterkit setup"):
            ssh.with_session(server, lambda session: work(session, ["model.path=org/other", *settings[1:]]))
    assert (storage / "models" / "name" / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert (storage / "datasets" / "problems" / "train.jsonl").read_text() == (data / "train.jsonl").read_text()
    with pytest.raises(UserError, match=r"model no-such is not on the cluster: .*models/no-such is not there"):
        ssh.with_session(server, lambda session: work(session, [f"model.path={storage}/models/no-such", *settings[1:]]))


def test_a_named_file_is_copied_beside_the_answers(
    ask: Ask, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ask(str(problems_file(tmp_path)), model_path=str(chat_checkpoint(tmp_path / "model")))
    (name,) = config.data_names
    assert name.startswith(f"{storage}/ray/experiments/eval/")
    assert [row.name for row in rows_there(config, storage, monkeypatch)] == ["sums"]
