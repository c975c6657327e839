import pytest
from compare.scripts import PLAIN, compare, forked, script  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


def test_plain(tmp_path, capsys):
    answer = compare(capsys, script(tmp_path, PLAIN), "--optim", "adamw_torch", "mars_adamw", "--search_seeds", "42")
    print(answer.out, answer.error)
    assert answer.code == 0
