"""Names of models: what has no form of a name is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfspec import ConfigError
from selfspec.machine.model_names import check_model_name


@pytest.mark.parametrize("name", ["/nowhere/at all", "a/b/c", "", "two words"])
def test_what_has_no_form_of_a_name_is_refused(name: str, tmp_path: Path) -> None:
    for wrong in (name, str(tmp_path)):
        with pytest.raises(ConfigError, match=r"MODEL must be a folder with a config\.json"):
            check_model_name(wrong, "MODEL")
    (tmp_path / "adapter_config.json").touch()
    check_model_name(str(tmp_path))
    check_model_name("owner/model")
