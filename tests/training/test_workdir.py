"""The folder of a run: one run at a time."""

import pytest

from pid_jax.errors import UserError
from pid_jax.training import workdir


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    with workdir.only_run(tmp_path):
        with pytest.raises(UserError, match="another run is at work in --workdir"):
            with workdir.only_run(tmp_path):
                pass
    with workdir.only_run(tmp_path):
        pass


@pytest.mark.parametrize("path", ["", None])
def test_no_folder(path):
    with pytest.raises(UserError, match="--workdir is missing"):
        workdir.open_workdir(path)


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken", tmp_path / "taken" / "inside"):
        with pytest.raises(UserError, match="cannot be written to"):
            workdir.open_workdir(str(path))
