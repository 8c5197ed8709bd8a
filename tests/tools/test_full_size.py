"""Full size: 1.30 to 1.40 billion random numbers there and back, with memory and time measured.

    pytest -m slow tests/tools/test_full_size.py -s

Needs 17 GB of disk (`--basetemp=DIR` chooses where) and minutes a network.
"""

import pytest

from benchmarks.convert import DTYPES, measure, table
from tests.tools.test_recognise import NETWORKS, shapes_of

pytestmark = pytest.mark.slow

MEMORY_LIMIT = 1.3  # copies of the weights in the destination's dtype
FULL_SIZE = [name for name in NETWORKS if NETWORKS[name]["net"] != "Discriminator_ImageDiT"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL_SIZE)
def test_there_and_back(tmp_path, name, dtype):
    row = measure(name, shapes_of(NETWORKS[name]), dtype, tmp_path)
    print(*table([row]), sep="\n")
    assert row.equal
    assert row.copies <= MEMORY_LIMIT
