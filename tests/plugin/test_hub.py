"""The folder that transformers loads: what it keeps from call to call, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import runpy
import sys

import pytest
from transformers.dynamic_module_utils import get_imports

import selfspec
from selfspec.hub.custom_generate.generate import generate
from tests.fakes import new_model, prompt


def run(model, **options):
    return generate(model=model, **prompt(), max_new_tokens=4, **options)


def test_what_is_learned_stays_with_the_model_and_its_copies():
    model = new_model()
    run(model)
    kept = model._selfspec.spec
    run(model)
    run(copy.deepcopy(model))
    assert model._selfspec.spec is kept
    assert kept.total_stats.num_calls == 3
    assert pickle.loads(pickle.dumps(model._selfspec)).spec is None


def test_no_package_is_named_that_nobody_has_registered():
    """Without selfspec, transformers would name what `requirements.txt` or the imports name."""
    folder = selfspec.hub_folder() / "custom_generate"
    assert not (folder / "requirements.txt").exists()
    assert "selfspec" not in get_imports(folder / "generate.py")


def test_without_the_package_it_says_what_to_do_and_names_no_address(monkeypatch):
    file = selfspec.hub_folder() / "custom_generate" / "generate.py"
    monkeypatch.setitem(sys.modules, "selfspec", None)
    with pytest.raises(ImportError, match=r"'pip install \.'") as caught:
        runpy.run_path(str(file))
    assert "://" not in str(caught.value)
