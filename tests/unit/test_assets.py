"""`clusterkit assets`: what is fetched, what is kept, and what is said when it goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commandline import run_clusterkit

from clusterkit.cli.actions.assets import get
from clusterkit.data.assets import CATALOGUE, get_asset, list_assets
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import RunError, UserError
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.hotpotqa_data import load_corpus


def quiet(text: str) -> None:
    """Progress that nobody reads."""


def official_items(count: int = 30) -> list[dict]:
    """Items of our own in the official format; two paragraphs answer, three do not."""
    items = []
    for n in range(count):
        context = [[f"Ship {n}", [f"Ship {n} was built in Port {n}.", "  It has two masts."]]]
        context += [[f"Port {n}", [f"Port {n} lies on Gulf {n}."]]]
        context += [[f"Lighthouse {n}-{k}", [f"Lighthouse {n}-{k} is {n + k} metres high."]] for k in range(3)]
        items.append(
            {
                "_id": f"{n:024x}",
                "question": f"On which gulf lies the port where Ship {n} was built?",
                "answer": f"Gulf {n}",
                "type": "bridge",
                "context": context,
                "supporting_facts": [[f"Ship {n}", 0], [f"Port {n}", 0], [f"Port {n}", 0]],
            }
        )
    return items


@pytest.fixture
def official(tmp_path: Path) -> Path:
    file = tmp_path / "official.json"
    file.write_text(json.dumps(official_items()), encoding="utf-8")
    return file


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `clusterkit assets …` like a user."""
    return run_clusterkit("assets", *arguments, env={**os.environ, **variables})


def test_official_file_becomes_a_folder_that_trains(official: Path, cache: str) -> None:
    record = get_asset("hotpotqa", str(official), cache, say=quiet)
    assert (record["outcome"], record["questions"], record["documents"], record["left_out"]) == ("fetched", 30, 150, 0)
    corpus = load_corpus(Path(record["path"]))
    assert corpus.questions[3].answers == ("Gulf 3",)
    assert [d.title for d in corpus.questions[3].gold] == ["Ship 3", "Port 3"]
    assert {d.text for d in corpus.questions[3].own} >= {"Ship 3 was built in Port 3. It has two masts."}
    tasks = HotpotQA(HotpotqaConfig(num_documents=9), seed=1, cache_dir=cache)
    assert tasks.train(0).meta["num_documents"] == 9


def test_items_without_evidence_and_repeated_ones_are_left_out_and_counted(official: Path, cache: str) -> None:
    items = official_items()
    items[4]["supporting_facts"].append(["Elsewhere", 0])
    items[5]["question"] = items[6]["question"]
    items[7]["_id"] = items[8]["_id"]
    official.write_text(json.dumps(items))
    record = get_asset("hotpotqa", str(official), cache, say=quiet)
    assert (record["questions"], record["left_out"]) == (27, 3)


def test_the_same_file_gives_the_same_bytes(official: Path, tmp_path: Path) -> None:
    packed = tmp_path / "official.json.gz"
    packed.write_bytes(gzip.compress(official.read_bytes()))
    folders = [
        Path(get_asset("hotpotqa", str(f), str(tmp_path / f.suffix), say=quiet)["path"]) for f in (official, packed)
    ]
    for name in ("questions.jsonl.gz", "documents.jsonl.gz"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_folder_in_our_schema_is_checked_and_copied(mini_hotpotqa: Path, cache: str) -> None:
    record = get_asset("hotpotqa", str(mini_hotpotqa), cache, say=quiet)
    assert load_corpus(Path(record["path"])) == load_corpus(mini_hotpotqa)
    (mini_hotpotqa / "questions.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"questions\.jsonl, line 1: column"):
        get_asset("hotpotqa", str(mini_hotpotqa), cache, force=True, say=quiet)
    assert len(load_corpus(Path(record["path"])).questions) == 12


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not JSON"),
        ("[", "not JSON"),
        ("[]", "must hold a list of HotpotQA items, not an empty list"),
        ('{"a": 1}', "must hold a list of HotpotQA items, not an object"),
        ("[3]", "item 1: must be an object, not a number"),
        ('[{"_id": "a", "question": "b"}]', "item 1: column 'answer' is missing (the test set has no answers"),
        ('[{"_id": "a", "question": 1}]', "item 1: column 'question' must be a string, not a number"),
        (
            '[{"_id": "a", "question": "b", "answer": "c", "context": [["d"]], "supporting_facts": []}]',
            "item 1: context must be",
        ),
        (
            '[{"_id": "a", "question": "b", "answer": "c", "context": [], "supporting_facts": [["d", 0]]}]',
            "no item has all its supporting paragraphs",
        ),
    ],
)
def test_a_file_of_another_shape_is_refused(official: Path, cache: str, content: str, problem: str) -> None:
    official.write_text(content)
    with pytest.raises(UserError) as caught:
        get_asset("hotpotqa", str(official), cache, say=quiet)
    assert problem in str(caught.value)
    assert str(official) in str(caught.value)
    assert list(Path(cache).iterdir()) == []


def test_missing_sources(tmp_path: Path, cache: str) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: no such file or folder"):
        get_asset("hotpotqa", str(tmp_path / "nowhere.json"), cache, say=quiet)
    with pytest.raises(UserError, match=r"the folder lacks questions\.jsonl and documents\.jsonl"):
        get_asset("hotpotqa", str(tmp_path), cache, say=quiet)
    with pytest.raises(UserError, match="Did you mean hotpotqa"):
        get_asset("hotpot", "", cache, say=quiet)


def test_a_good_copy_is_kept_and_a_changed_one_is_noticed(official: Path, cache: str) -> None:
    folder = Path(get_asset("hotpotqa", str(official), cache, say=quiet)["path"])
    before = (folder / "clusterkit-asset.json").stat().st_mtime_ns
    for source in ("", str(official)):
        assert get_asset("hotpotqa", source, cache, say=quiet)["outcome"] == "present"
    assert (folder / "clusterkit-asset.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"was made from .* add --force"):
        get_asset("hotpotqa", "elsewhere.json", cache, say=quiet)
    (folder / "questions.jsonl.gz").write_bytes(b"changed")
    (folder / "documents.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"documents\.jsonl\.gz is missing, questions\.jsonl\.gz is different.*--force"):
        get_asset("hotpotqa", "", cache, say=quiet)
    assert get_asset("hotpotqa", str(official), cache, force=True, say=quiet)["outcome"] == "fetched"
    assert get_asset("hotpotqa", "", cache, say=quiet)["outcome"] == "present"


def test_data_put_into_the_cache_by_hand_is_checked(mini_hotpotqa: Path, cache: str) -> None:
    Path(cache).mkdir()
    mini_hotpotqa.rename(Path(cache) / "hotpotqa")
    assert get_asset("hotpotqa", "", cache, say=quiet)["outcome"] == "present"
    (Path(cache) / "hotpotqa" / "documents.jsonl").write_text("no json")
    with pytest.raises(UserError, match=r"documents\.jsonl, line 1: not JSON"):
        get_asset("hotpotqa", "", cache, say=quiet)


def test_the_next_command_says_what_else_it_needs(
    official: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CLUSTERKIT_DATA", str(tmp_path / "data"))
    model, train = CATALOGUE["smollm2-135m"], "clusterkit train --preset 135M_cpu"

    assert model.next_command() == f"clusterkit assets get hotpotqa && {train}"
    assert model.next_command("my cache") == (
        f"clusterkit assets get hotpotqa --cache-dir 'my cache' && {train} 'cache_dir=my cache'"
    )
    get("hotpotqa", str(official), "", force=False, as_json=False)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"next: clusterkit assets get smollm2-135m && {train} --task hotpotqa"
    assert model.next_command() == train
    (state,) = (state for state in list_assets() if state["name"] == "hotpotqa")
    assert state["use"] == f"clusterkit assets get smollm2-135m && {train} --task hotpotqa"
    model.folder().mkdir(parents=True)
    assert CATALOGUE["hotpotqa"].next_command() == f"{train} --task hotpotqa"


def test_list_says_what_the_cache_has(official: Path, cache: str) -> None:
    assert {"smollm2-135m", "hotpotqa", "gsm8k"} <= {state["name"] for state in list_assets(cache)}
    assert not any(state["present"] for state in list_assets(cache))
    get_asset("hotpotqa", str(official), cache, say=quiet)
    (state,) = (state for state in list_assets(cache) if state["name"] == "hotpotqa")
    assert state["present"]
    assert state["bytes"] > 1000


class _Server(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        if self.path in ("/short", "/hang"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"[")
            self.close_connection = True
            if self.path == "/hang":
                # Until the other side has gone.
                self.rfile.read(1)
            return
        super().do_GET()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A web server over the test's folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(tmp_path))) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{web.server_address[1]}"
        web.shutdown()
        thread.join()


def test_download_by_url_records_no_secret(server: str, official: Path, cache: str) -> None:
    url = server.replace("//", "//user:hidden@") + "/official.json?token=hidden"
    said: list[str] = []
    record = get_asset("hotpotqa", url, cache, say=said.append)
    assert (record["outcome"], record["questions"]) == ("fetched", 30)
    assert sorted(path.name for path in Path(record["path"]).iterdir()) == [
        "clusterkit-asset.json",
        "documents.jsonl.gz",
        "questions.jsonl.gz",
    ]
    assert record["source"] == f"{server}/official.json"
    assert any("downloading" in line for line in said)
    assert "hidden" not in "".join(said) + (Path(record["path"]) / "clusterkit-asset.json").read_text()
    assert get_asset("hotpotqa", url, cache, say=quiet)["outcome"] == "present"


@pytest.mark.parametrize(("page", "problem"), [("/nowhere.json", "answered 404"), ("/short", "peer closed connection")])
def test_failed_download_leaves_nothing(server: str, cache: str, page: str, problem: str) -> None:
    with pytest.raises(RunError, match=problem) as caught:
        get_asset("hotpotqa", server + page, cache, say=quiet)
    assert "--from FILE" in str(caught.value)
    assert list(Path(cache).iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_download_leaves_nothing(server: str, cache: str, number: signal.Signals) -> None:
    arguments = ["assets", "get", "hotpotqa", "--from", f"{server}/hang", "--cache-dir", cache]
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterkit.cli.main", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "downloading" in process.stderr.readline()
    assert len(list(Path(cache).iterdir())) == 1
    process.send_signal(number)
    rest = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert rest.startswith("error: interrupted: nothing incomplete was left behind")
    assert list(Path(cache).iterdir()) == []


def test_server_that_is_not_there(cache: str) -> None:
    done = command("get", "hotpotqa", "--from", "http://127.0.0.1:9/x.json", "--cache-dir", cache)
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9/x.json:")
    assert "Traceback" not in done.stderr


def test_command_prints_json_on_stdout_and_progress_on_stderr(official: Path, cache: str) -> None:
    done = command("get", "hotpotqa", "--from", str(official), "--json", CLUSTERKIT_CACHE=cache)
    assert done.returncode == 0
    assert json.loads(done.stdout)["path"] == f"{cache}/hotpotqa"
    assert "converting 30 questions" in done.stderr
    listed = json.loads(command("list", "--json", CLUSTERKIT_CACHE=cache).stdout)
    assert [entry["name"] for entry in listed if entry["present"]] == ["hotpotqa"]
    again = command("get", "hotpotqa", CLUSTERKIT_CACHE=cache)
    assert (again.returncode, "is there already, unchanged" in again.stdout) == (0, True)


def test_the_command_imports_nothing_heavy() -> None:
    program = (
        "import clusterkit.cli.assets, clusterkit.data.assets.smollm2, clusterkit.data.assets.hotpotqa, sys\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert not {"torch", "transformers", "numpy", "httpx", "gguf"} & set(done.stdout.split())
