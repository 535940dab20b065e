"""A wording of one's own for the memory agent's prompts: read, checked, carried along, and put into token ids."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import byte_tokenizer, small_config
from pydantic import ValidationError

from clusterkit.backends.ray.request import on_cluster
from clusterkit.capacity.plan import template_tokens
from clusterkit.config.resolve import resolve
from clusterkit.evaluate.request import make_request
from clusterkit.hosts.model import Cluster, Host
from evaluation.config import EvalConfig
from evaluation.plan import row_inputs
from trainer.agents.memagent import MemAgent
from trainer.checkpoint.fingerprint import differences, fingerprint
from trainer.config import RunConfig
from trainer.config_agents import MemagentConfig
from trainer.errors import UserError

DOCS = Path(__file__).parents[2] / "docs"
UPDATE = "Read.\n\n<problem> \n{problem}\n</problem>\n\n<memory>{memory}</memory>\n{section}\n\nUpdated memory:\n"
FINAL = "Answer in \\boxed{{}}, or \\boxed{number}.\n<problem> \n{problem}\n</problem>\n{memory}\n\nYour answer:\n"


def file(folder: Path, name: str = "wording.yaml", **texts: Any) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({"update": UPDATE, "final": FINAL, **texts}), encoding="utf-8")
    return path


def settings(path: Path, *others: str) -> RunConfig:
    return resolve("135M_cpu", "hotpotqa", (f"agent.template_file={path}", *others)).config


def test_the_prompts_are_the_files_text_to_the_last_blank(tmp_path: Path) -> None:
    """As token ids around the placeholders, in the model's own chat template."""
    tokenizer = byte_tokenizer()
    agent = MemAgent(settings(file(tmp_path)).agent, tokenizer)
    values = {name: tokenizer(name.upper())["input_ids"] for name in ("problem", "memory", "section")}

    update = tokenizer.decode(agent.prompts.update.fill(values))
    final = tokenizer.decode(agent.prompts.final.fill(values))

    filled = UPDATE.replace("{problem}", "PROBLEM").replace("{memory}", "MEMORY").replace("{section}", "SECTION")
    assert update == f"[user]{filled}[end][assistant]"
    assert final == f"[user]{FINAL.replace('{problem}', 'PROBLEM').replace('{memory}', 'MEMORY')}[end][assistant]"
    assert tokenizer.decode(agent.prompts.no_memory) == "No previous memory"


def test_blocks_of_yaml_keep_a_blank_at_a_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "typed.yaml"
    path.write_text(
        "update: |\n  <problem> \n  {problem}\n\n  {memory} {section}\n  Updated memory:\n"
        "final: |-\n  {problem} {memory}\n  Your answer:\nno_memory: ''\n"
    )
    agent = settings(path).agent

    assert agent.wording == {
        "update": "<problem> \n{problem}\n\n{memory} {section}\nUpdated memory:\n",
        "final": "{problem} {memory}\nYour answer:",
        "no_memory": "",
    }
    assert MemAgent(agent, byte_tokenizer()).prompts.no_memory == []


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"update": UPDATE.replace("{memory}", "")}, r"update lacks \{memory\}: it is to stand there once"),
        ({"update": UPDATE + "{memory}"}, r"update has 2 times \{memory\}"),
        (
            {"update": UPDATE.replace("{problem}", "{prompt}")},
            r"update has \{prompt\}, .*: \{prompt\} is \{problem\} here",
        ),
        (
            {"update": UPDATE.replace("{section}", "{chunk}")},
            r"update has \{chunk\}, .*: \{chunk\} is \{section\} here",
        ),
        (
            {"update": UPDATE + "{date}"},
            r"\{date\}, which is not filled in: there are \{problem\}, \{memory\}, \{section\}",
        ),
        (
            {"update": UPDATE.replace("{section}", "{{section}}")},
            r"has \{\{section\}\}: write \{section\}, with single",
        ),
        ({"final": FINAL + "{section}"}, r"final has \{section\}, .*: no section is read for the answer"),
        ({"final": FINAL.replace("{problem}", "")}, r"final lacks \{problem\}"),
        ({"final": 7}, "final is no text but 7: it is to have the keys update and final"),
        ({"no_memory": "none of {memory}"}, r"no_memory has \{memory\}: nothing is filled in there"),
        ({"answer": "x"}, "has answer, final, update: it is to have the keys update and final"),
    ],
)
def test_what_is_wrong_with_a_wording_is_told_with_its_file(texts: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = file(tmp_path, **texts)

    with pytest.raises(UserError, match=rf"agent\.template_file={re.escape(str(path))}:? .*{says}") as refused:
        settings(path)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, r"cannot be read: No such file or directory: name a YAML file of this machine"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"update: [", r"is not YAML \(.*line 1.*\): it is to have the keys update and final"),
        (b"", "has a NoneType: it is to have"),
        (b"just a prompt with {problem}", "has a str: it is to have"),
        (b"update: x", "has update: it is to have"),
        (b"x" * (300 << 10), "has more than 256 KiB: it is to hold two prompts, no documents"),
    ],
)
def test_a_file_that_is_no_wording_is_refused(data: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=says):
        settings(path)
    with pytest.raises(UserError, match="Is a directory"):
        settings(tmp_path)


@pytest.mark.parametrize(
    ("preset", "task", "others", "says"),
    [
        (
            "1.5B_n4",
            "math",
            (),
            "is a setting of agent.name=memagent, and this run has agent.name=single_turn: leave it out",
        ),
        ("memalpha-tiny", None, (), "is a setting of agent.name=memagent, and this run has agent.name=memalpha"),
        ("tiny", None, (), "is put into a chat template, and agent.template=words is for models without"),
        (
            "135M_cpu",
            "hotpotqa",
            ("agent.prompt_order=section_first",),
            "has an order of its own: leave agent.prompt_or",
        ),
        (
            "135M_cpu",
            "hotpotqa",
            ("agent.repeat_problem=true",),
            "with the problem once: leave agent.repeat_problem out",
        ),
    ],
)
def test_where_a_wording_has_no_place_it_is_refused(
    preset: str, task: str | None, others: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        resolve(preset, task, (f"agent.template_file={file(tmp_path)}", *others))


def test_the_window_counts_the_files_words(tmp_path: Path) -> None:
    short, long = (
        MemAgent(settings(file(tmp_path, update=UPDATE + more)).agent, byte_tokenizer()) for more in ("", "x" * 500)
    )

    assert long.longest_conversation() == short.longest_conversation() + 500
    short.check_window(short.longest_conversation())
    with pytest.raises(UserError, match="over the model's context window"):
        long.check_window(short.longest_conversation())


def test_a_plan_counts_them_too(tmp_path: Path) -> None:
    plain, worded = MemagentConfig(), settings(file(tmp_path, update=UPDATE + "word " * 600)).agent

    assert template_tokens(plain) == 220
    assert template_tokens(worded) > 600


def test_the_text_goes_with_the_configuration_to_where_the_file_is_not(tmp_path: Path) -> None:
    path = file(tmp_path)
    config = settings(path)
    path.unlink()

    there = on_cluster(config, Cluster(name="c", hosts=(Host(name="a"),), storage="/storage"))
    read = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(there.model_dump(mode="json"))))

    assert read.agent.wording["update"] == UPDATE
    assert (
        MemAgent(read.agent, byte_tokenizer()).prompts.update.parts
        == MemAgent(config.agent, byte_tokenizer()).prompts.update.parts
    )


def test_a_configuration_written_by_hand_is_read_with_its_file(tmp_path: Path) -> None:
    written = {"agent": {"template_file": str(file(tmp_path))}, "model": {"path": "/m"}, "task": {"name": "hotpotqa"}}

    assert RunConfig.model_validate(written).agent.wording["final"] == FINAL


def test_texts_that_are_typed_are_checked_as_a_files_are() -> None:
    typed = MemagentConfig(wording={"update": UPDATE, "final": FINAL})

    assert MemAgent(typed, byte_tokenizer()).prompts.update.num_fixed > len(UPDATE) - 30
    with pytest.raises(ValidationError, match=r"final lacks \{problem\}"):
        MemagentConfig(wording={"update": UPDATE})
    with pytest.raises(ValidationError, match="first is unknown"):
        MemagentConfig(wording={"update": UPDATE, "final": FINAL, "first": "x"})


def test_a_run_goes_on_with_the_same_text_and_no_other(tmp_path: Path) -> None:
    first = fingerprint(settings(file(tmp_path)))

    assert differences(first, fingerprint(settings(file(tmp_path, "moved.yaml")))) == []
    (line,) = differences(first, fingerprint(settings(file(tmp_path, final=FINAL + " "))))
    assert re.fullmatch(r"agent\.wording: sha256:\w{16} -> sha256:\w{16}", line)
    (line,) = differences(first, fingerprint(resolve("135M_cpu", "hotpotqa").config))
    assert line.endswith(" -> ")


def test_runs_from_before_go_on() -> None:
    now = fingerprint(small_config())
    before = {name: value for name, value in now.items() if name not in ("agent.wording", "agent.repeat_problem")}

    assert differences(before, now) == []


def asked(settings_of_run: RunConfig | None, *assignments: str) -> EvalConfig:
    values = {"model_path": "/m", "output_path": "/o", "data_names": ["ruler_hqa@50"]}
    return make_request(values, settings_of_run, assignments)


def test_an_evaluation_takes_the_runs_text_or_another_files(tmp_path: Path) -> None:
    path = file(tmp_path)
    trained = settings(path)
    path.unlink()

    assert asked(trained).agent.wording == trained.agent.wording
    other = file(tmp_path, "other.yaml", final=FINAL + "!")
    assert asked(trained, f"agent.template_file={other}").agent.wording["final"] == FINAL + "!"
    assert asked(None, f"agent.template_file={other}").agent.wording["update"] == UPDATE
    assert asked(trained, "agent.template_file=").agent.wording == {}
    with pytest.raises(UserError, match=r"agent\.template_file=.*cannot be read: No such file"):
        asked(trained, f"agent.template_file={tmp_path}/none.yaml")


class Hqa:
    """What `row_inputs` reads of a suite."""

    identity, name, rule, as_trained = "x", "ruler_hqa@50", "", False


def test_answers_belong_to_a_text_not_to_its_path(tmp_path: Path) -> None:
    def inputs(*assignments: str) -> dict[str, Any]:
        config = asked(None, *assignments)
        return row_inputs(config, Hqa(), "memagent", "sha", "embedded")  # type: ignore[arg-type]

    here, moved = (inputs(f"agent.template_file={file(tmp_path, name)}") for name in ("a.yaml", "b.yaml"))
    other = inputs(f"agent.template_file={file(tmp_path, 'c.yaml', final=FINAL + '!')}")

    assert here == moved != other
    # What was recorded before there were such files is found again.
    assert not {"template_file", "wording", "repeat_problem"} & set(inputs()["agent"])
    assert inputs("agent.repeat_problem=true")["agent"]["repeat_problem"] is True


MEMAGENTS = '''
"""A module that holds its prompts as MemAgent's modules do."""
import torch
LIMIT = 3
TEMPLATE = """Read this.

<problem>~
{prompt}
</problem>

<memory>
{memory}
</memory>

<section>
{chunk}
</section>

Updated memory:
"""
FINAL_NAME = """Answer in \\\\boxed{{}}.

<problem>~
{prompt}
</problem>

<memory>
{memory}
</memory>

Your answer:
"""
'''.replace("~", " ")


@pytest.mark.parametrize(("name", "braces"), [("TEMPLATE_FINAL_BOXED", "{{}}"), ("TEMPLATE_FINAL", "{}")])
def test_the_documented_script_makes_the_file_from_memagents_own_module(name: str, braces: str, tmp_path: Path) -> None:
    """In training MemAgent's final prompt is not formatted, so its braces stay doubled; in its evaluation it is."""
    text = (DOCS / "coming-from-areal.md").read_text(encoding="utf-8")
    script = re.search(r"    cat > wording\.py <<'END'\n(.*?)\n    END\n", text, re.DOTALL)
    assert script is not None
    (tmp_path / "wording.py").write_text("\n".join(line[4:] for line in script[1].splitlines()))
    (tmp_path / "memory.py").write_text(MEMAGENTS.replace("FINAL_NAME", name))

    done = subprocess.run(
        [sys.executable, "wording.py", "memory.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (tmp_path / "memagent.yaml").write_text(done.stdout)
    wording = settings(tmp_path / "memagent.yaml").agent.wording

    assert wording["update"].startswith("Read this.\n\n<problem> \n{problem}\n</problem>\n\n<memory>\n{memory}\n")
    assert wording["update"].endswith("<section>\n{section}\n</section>\n\nUpdated memory:\n")
    assert wording["final"].startswith(f"Answer in \\boxed{braces}.\n\n<problem> \n{{problem}}\n")
