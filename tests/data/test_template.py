"""Chat templates: which parts are answers, templates of tokenizers' folders, the sandbox, the copy
in the run.
"""

import json
from pathlib import Path

import pytest

from fp4train.data import CHATML, ChatTemplate, find_template, keep_template, kept_template
from fp4train.errors import DataError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "7"},
]


def learned(template: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    found = template.finder().find(messages)
    return [found.text[start:end] for start, end in found.answers]


LLAMA = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|h|>' + m['role'] + '<|/h|>' + "
    "m['content'] | trim "
    "+ '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>' }}{%- endif %}"
)


def test_templates_as_tokenizers_have_them() -> None:
    """Trimmed contents and a beginning token."""
    template = ChatTemplate(source=LLAMA, variables={"bos_token": "<|b|>"})
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho\n"}]
    assert template.render(messages) == "<|b|><|h|>user<|/h|>hi<|eot|><|h|>assistant<|/h|>ho<|eot|>"
    assert learned(template, messages) == ["ho<|eot|>"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (
            "{{ messages.__class__.__mro__ }}{{ messages[0].__init__.__globals__['x'] }}",
            "refuses it",
        ),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses it"),
        ("{{ messages.append(1) }}", "refuses it"),
        ("{{ messages | length }}", "writes nothing for its answers"),
        ("{{ 1 / 0 }}", "refuses it"),
    ],
)
def test_templates_that_cannot_be_used_say_why(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChatTemplate(source=source).finder().find(TALK)


def test_a_conversation_without_an_answer_teaches_nothing() -> None:
    with pytest.raises(ValueError, match='no message of the role "assistant"'):
        ChatTemplate(source=CHATML).finder().find(TALK[:2])


def test_the_template_is_that_of_the_tokenizers_folder_and_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run = tmp_path / "run"
    folder.mkdir()
    settings = {"chat_template": LLAMA, "bos_token": {"content": "<|b|>"}, "eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find_template(None, str(folder), run)
    assert found.source == LLAMA and found.variables == {"bos_token": "<|b|>"}
    (folder / "tokenizer_config.json").unlink()
    again = find_template(None, str(folder), run)
    assert (again.source, again.variables) == (found.source, found.variables)
    (folder / "chat_template.jinja").write_text("own")
    assert find_template(None, str(folder / "tokenizer.json"), tmp_path / "other").source == "own"


def test_of_several_templates_the_default_is_taken_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    settings = {
        "chat_template": named,
        "pad_token": "<pad>",
        "added_tokens_decoder": {"x" * 2_000_000: {}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find_template(None, str(tmp_path), tmp_path / "run")
    assert (found.source, found.variables) == ("plain", {"pad_token": "<pad>"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("documents")
    assert "which are left alone: tool_use" in caplog.text
    keep_template(tmp_path, tmp_path / "other")
    assert "which are left alone: rag, tool_use" in caplog.text


def test_a_resumed_run_is_told_the_day_on_which_it_began(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    first = find_template(str(tmp_path / "a.jinja"), None, tmp_path / "run")
    kept = json.loads((tmp_path / "run/chat_template.json").read_text())
    kept["now"] = "2025-02-03T04:05:06"
    (tmp_path / "run/chat_template.json").write_text(json.dumps(kept))
    again = find_template(None, None, tmp_path / "run")
    assert again.render(TALK) == "2025-02-03 04:05:06" != first.render(TALK)
    del kept["now"]  # from before it was kept
    (tmp_path / "run/chat_template.json").write_text(json.dumps(kept))
    assert find_template(None, None, tmp_path / "run").render(TALK) == "2024-07-26 00:00:00"


def test_a_template_that_no_conversation_was_learnt_by_gives_way_to_a_file(tmp_path: Path) -> None:
    """It came with the tokenizer of a run on other text, which now goes on with conversations."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("theirs")
    (tmp_path / "mine.jinja").write_text("mine")
    for name, path, wanted in (("a", None, "theirs"), ("b", str(tmp_path / "mine.jinja"), "mine")):
        keep_template(folder, tmp_path / name)
        kept = kept_template(tmp_path / name)
        assert kept is not None and (kept.source, kept.trained) == ("theirs", False)
        assert find_template(path, None, tmp_path / name).source == wanted
        keep_template(folder, tmp_path / name)
        again = kept_template(tmp_path / name)
        assert again is not None and (again.source, again.trained) == (wanted, True)
    keep_template(tmp_path / "nowhere", tmp_path / "c")
    assert kept_template(tmp_path / "c") is None


def test_a_file_of_the_user_comes_first_and_without_one_it_is_chatml(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    assert find_template(str(tmp_path / "mine.jinja"), None, tmp_path / "a").source == "mine"
    assert find_template(None, None, tmp_path / "b").source == CHATML
    assert find_template(None, str(tmp_path), tmp_path / "c").source == CHATML


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"template": "x"}', '{"template": "x", "variables": 1}']
)
def test_a_damaged_copy_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(DataError, match=r"chat_template\.json .* cannot be read"):
        find_template(None, None, tmp_path)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.template=.*gone\.jinja does not exist"):
        find_template(str(tmp_path / "gone.jinja"), None, tmp_path / "run")
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON table"):
        find_template(None, str(tmp_path), tmp_path / "run")
    (tmp_path / "tokenizer_config.json").write_text("[" + "9" * 5000 + "]")
    with pytest.raises(DataError, match=r"no JSON table: an integer has more than 4,300 digits$"):
        find_template(None, str(tmp_path), tmp_path / "run")


def test_a_file_is_told_the_special_tokens_of_the_tokenizers_folder(tmp_path: Path) -> None:
    """As transformers tells them to it where the export is used."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|b|>", "padding_side": "left"}')
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}mine")
    for number, tokenizer in enumerate((folder, folder / "tokenizer.json")):
        run = tmp_path / f"run{number}"
        found = find_template(str(tmp_path / "mine.jinja"), str(tokenizer), run)
        assert found.variables == {"bos_token": "<|b|>"}
        assert found.render(TALK) == "<|b|>mine"
