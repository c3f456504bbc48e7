"""docs/torch.md and docs/llm.md: their code runs and prints what they say."""

import re

import pytest

from tests.helpers import ROOT


def run_page(name, capsys):
    page = (ROOT / "docs" / name).read_text()
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(code, name, "exec"), scope)
    expected = re.findall(r"# prints (.*)", page)
    assert capsys.readouterr().out.splitlines() == expected
    return len(expected)


def test_the_page_on_modules_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
    assert run_page("torch.md", capsys) == 6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_page_on_language_models_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    for name in ("torch", "transformers", "peft", "safetensors"):
        pytest.importorskip(name, reason="needs torch==2.13.0 and the extra llm")
    monkeypatch.chdir(tmp_path)
    assert run_page("llm.md", capsys) == 9
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
